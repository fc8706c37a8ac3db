/* A table that its column cuts takes the free margin beside it, while the list of the page's contents folds away; and
   where one scrolls, a shadow lies at the edge behind which it goes on. Without this it scrolls in its column. */
document.addEventListener("DOMContentLoaded", () => {
  const contents = document.querySelector("div.bd-sidebar-secondary");
  const seen = new Set();
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) seen[isIntersecting ? "add" : "delete"](target);
    // The theme's own class, for what stands in the margin.
    contents?.classList.toggle("hide", seen.size > 0);
  });

  for (const frame of document.querySelectorAll("article .pst-scrollable-table-container")) {
    // What is folded away has no width yet, and no margin beside it.
    const isWide = !frame.closest("details") && frame.scrollWidth > frame.clientWidth + 1;
    const edges = document.createElement("div");
    edges.className = "kvbook-edges";
    frame.before(edges);
    edges.append(frame);
    if (isWide) {
      edges.classList.add("kvbook-wide");
      watch.observe(edges);
    }
    const update = () => {
      edges.classList.toggle("more-left", frame.scrollLeft > 1);
      edges.classList.toggle("more-right", frame.scrollLeft + frame.clientWidth < frame.scrollWidth - 1);
    };
    frame.addEventListener("scroll", update, { passive: true });
    new ResizeObserver(update).observe(frame);
  }
});
