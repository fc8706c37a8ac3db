(judged) => {
  const root = document.documentElement, found = new Map(), old = new Set(judged);
  const grounds = new Map([[root, getComputedStyle(root).backgroundColor]]);
  const digest = (text) => {
    let high = 0xdeadbeef, low = 0x41c6ce57;
    for (let i = 0; i < text.length; i++) {
      high = Math.imul(high ^ text.charCodeAt(i), 2654435761);
      low = Math.imul(low ^ text.charCodeAt(i), 1597334677);
    }
    return `${high} ${low}`;
  };
  // What is behind an element: most have nothing of their own there, and lie where their parent does.
  const ground = (element) => {
    if (!grounds.has(element)) {
      const has = getComputedStyle(element), below = ground(element.parentElement);
      const nothing = has.backgroundColor === "rgba(0, 0, 0, 0)" && has.backgroundImage === "none" &&
        has.opacity === "1" && ["static", "relative"].includes(has.position);
      grounds.set(element, nothing ? below : digest([below, element.className, has.backgroundColor,
        has.backgroundImage, has.opacity, has.position].join("|")));
    }
    return grounds.get(element);
  };
  const style = (element) => {
    const has = getComputedStyle(element), around = getComputedStyle(element.parentElement);
    return digest([ground(element), element.tagName, has.color, has.fontSize, has.fontWeight, has.textDecorationLine,
      around.color, element.parentElement.tagName].join("|"));
  };
  for (const element of document.body.querySelectorAll("*"))
    if ([...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim()) &&
        element.getClientRects().length) {
      const its = style(element);
      if (!old.has(its) && !found.has(its)) found.set(its, element);
    }
  const mark = "data-of-a-new-style";
  for (const before of document.querySelectorAll(`[${mark}]`)) before.removeAttribute(mark);
  for (const element of found.values()) element.setAttribute(mark, "");
  axe.configure({rules: [
    {id: "color-contrast", selector: `[${mark}]`}, {id: "link-in-text-block", selector: `a[href][${mark}]`},
  ]});
  return [...found.keys()];
}
