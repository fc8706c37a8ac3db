/* The front page's figure says its values: to a pointer or a finger at the point, and for a chosen line below the figure.
   Without this the figure leads to its chapter, and the values of its bold lines are in the table below it. */
(() => {
  // How far from a point, in pixels of the screen, a pointer or a finger still means it.
  const NEAR = 28;

  function add(parent, tag, className, text = "") {
    const made = document.createElement(tag);
    made.className = className;
    made.textContent = text;
    parent.append(made);
    return made;
  }

  function enable(image, lines) {
    const frame = document.createElement("div");
    frame.className = "kvbook-hover";
    const link = image.closest("a") ?? image;
    link.before(frame);
    // A tap is for a value; the caption still leads to the chapter.
    frame.append(image);
    if (link !== image) link.remove();
    const marks = add(frame, "div", "kvbook-hover-marks");
    const tip = add(frame, "div", "kvbook-hover-tip");
    tip.hidden = true;

    function mark(points) {
      marks.replaceChildren();
      for (const [, , x, y] of points) {
        Object.assign(add(marks, "span", "").style, { left: `${x}%`, top: `${y}%` });
      }
    }

    const bar = document.createElement("div");
    bar.className = "kvbook-filter-bar";
    const select = document.createElement("select");
    select.append(new Option("none", ""));
    for (const model of new Set(lines.map((line) => line.model))) {
      const group = document.createElement("optgroup");
      group.label = model;
      lines.forEach((line, number) => {
        if (line.model === model) group.append(new Option(line.line, number));
      });
      select.append(group);
    }
    const label = document.createElement("label");
    label.append("Values of the line ", select);
    const said = document.createElement("output");
    bar.append(label, said);
    frame.after(bar);

    function choose() {
      const line = lines[select.value];
      mark(line ? line.points : []);
      said.value = line ? line.points.map(([dtype, value]) => `${dtype}: ${value}`).join("; ") : "";
    }

    function leave() {
      tip.hidden = true;
      choose();
    }

    function near(event) {
      const box = image.getBoundingClientRect();
      let best = null;
      let least = NEAR;
      for (const line of lines) {
        for (const point of line.points) {
          const apart = Math.hypot(
            box.left + (box.width * point[2]) / 100 - event.clientX,
            box.top + (box.height * point[3]) / 100 - event.clientY,
          );
          // Of points at one place the first counts: the lines that are drawn boldly come first.
          if (apart < least - 1) [least, best] = [apart, [line, point]];
        }
      }
      if (!best) return leave();
      const [line, point] = best;
      mark([point]);
      tip.hidden = false;
      tip.textContent = `${line.model}, ${line.line}, ${point[0]}: ${point[1]}`;
      Object.assign(tip.style, {
        left: point[2] < 50 ? `${point[2]}%` : "auto",
        right: point[2] < 50 ? "auto" : `${100 - point[2]}%`,
        top: point[3] < 25 ? `calc(${point[3]}% + 0.8rem)` : "auto",
        bottom: point[3] < 25 ? "auto" : `calc(${100 - point[3]}% + 0.8rem)`,
      });
    }

    select.addEventListener("input", choose);
    frame.addEventListener("pointermove", near);
    frame.addEventListener("pointerdown", near);
    frame.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && leave());
  }

  document.addEventListener("DOMContentLoaded", () => {
    const image = document.querySelector("img.kvbook-hero");
    const values = document.getElementById("kvbook-hero-values");
    if (image && values) enable(image, JSON.parse(values.textContent));
  });
})();
