/* The table of models' memory gets controls for dtype, length and batch; without this it shows 16 bits and one text. */
(() => {
  const GIB = 2 ** 30;
  // Published sizes in units of 10^9 bytes; a tenth is left for activations and the library's workspace.
  const CARDS = { T4: 16, L4: 24, "A100 40 GB": 40, "A100 80 GB": 80 };
  const USABLE = 0.9;

  function control(bar, label, input) {
    const named = document.createElement("label");
    named.append(`${label} `, input);
    bar.append(named);
    return input;
  }

  function number(value, most) {
    const input = document.createElement("input");
    Object.assign(input, { type: "number", min: 1, max: most, value });
    return input;
  }

  function enable(table) {
    const bar = document.createElement("div");
    bar.className = "kvbook-filter-bar";
    const dtype = document.createElement("select");
    dtype.append(new Option("bf16 or fp16", 2), new Option("fp32", 4));
    control(bar, "dtype", dtype);
    const tokens = control(bar, "tokens", number(4096, 1e7));
    const texts = control(bar, "texts in the batch", number(1, 1e5));
    for (const text of ["weights and cache, GiB", "fits"]) {
      const head = document.createElement("th");
      head.scope = "col";
      head.textContent = text;
      table.tHead.rows[0].append(head);
    }
    const rows = [...table.tBodies[0].rows].map((row) => ({
      weights: Number(row.cells[3].textContent) / 2,
      cache: (Number(row.cells[4].textContent) * 1024) / 2 / GIB,
      total: row.insertCell(),
      fits: row.insertCell(),
    }));

    function apply() {
      const asked = Math.max(1, tokens.valueAsNumber || 1) * Math.max(1, texts.valueAsNumber || 1);
      for (const { weights, cache, total, fits } of rows) {
        const gib = (weights + cache * asked) * Number(dtype.value);
        total.textContent = gib.toFixed(2);
        const card = Object.entries(CARDS).find(([, size]) => gib <= (USABLE * size * 1e9) / GIB);
        fits.textContent = card ? card[0] : "none of them";
      }
    }

    [dtype, tokens, texts].forEach((input) => input.addEventListener("input", apply));
    apply();
    (table.closest(".pst-scrollable-table-container") ?? table).before(bar);
  }

  document.addEventListener("DOMContentLoaded", () => {
    document.querySelectorAll("table#tab-memory-needed").forEach(enable);
  });
})();
