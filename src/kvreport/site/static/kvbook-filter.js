/* A table that says so gets a search box, a choice for every column of few different values, and heads that sort;
   without this it is whole. */
(() => {
  const FEW = 12;

  // A cell may list several values.
  const listed = (row, column) => row.cells[column].textContent.trim().split(" · ");

  function enable(table, number) {
    const rows = [...table.tBodies[0].rows];
    const bar = document.createElement("div");
    bar.className = "kvbook-filter-bar";
    const add = (label, control) => {
      const named = document.createElement("label");
      named.append(`${label} `, control);
      bar.append(named);
      control.addEventListener("input", apply);
    };

    const search = document.createElement("input");
    search.type = "search";
    search.id = `kvbook-search-${number}`;
    const choices = [];
    const count = document.createElement("output");
    count.htmlFor = search.id;

    function apply() {
      const wanted = search.value.trim().toLowerCase();
      let shown = 0;
      for (const row of rows) {
        const fits = row.textContent.toLowerCase().includes(wanted)
          && choices.every(({ column, select }) => !select.value || listed(row, column).includes(select.value));
        row.hidden = !fits;
        shown += fits;
      }
      count.value = `${shown} of ${rows.length}`;
    }

    add("Search", search);
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const values = [...new Set(rows.flatMap((row) => listed(row, column)))].filter(Boolean).sort();
      const name = head.textContent.trim();
      const most = rows.some((row) => listed(row, column).length > 1) ? 2 * FEW : FEW;
      // A column of a release has marks, which are no choice.
      if (values.length < 2 || values.length > most || /^\d/.test(name)) return;
      const select = document.createElement("select");
      select.append(new Option("all", ""), ...values.map((value) => new Option(value)));
      choices.push({ column, select });
      add(name, select);
    });
    bar.append(count);
    apply();
    const frame = table.closest(".pst-scrollable-table-container") ?? table;
    frame.before(bar);
  }

  const key = (row, column) => row.cells[column].textContent.trim();

  function compare(a, b) {
    return a.localeCompare(b, "en", { numeric: true, sensitivity: "base" });
  }

  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "kvbook-sort";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...table.tBodies[0].rows];
        rows.sort((a, b) => (down ? -1 : 1) * compare(key(a, column), key(b, column)));
        table.tBodies[0].append(...rows);
      });
    });
  }

  document.addEventListener("DOMContentLoaded", () => {
    document.querySelectorAll("table.kvbook-filter").forEach((table, number) => {
      enable(table, number);
      sortable(table);
    });
  });
})();
