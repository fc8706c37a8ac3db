(judged) => {
  const styles = new Map([[document.documentElement, ""]]), found = new Map(), old = new Set(judged);
  const digest = (text) => {
    let high = 0xdeadbeef, low = 0x41c6ce57;
    for (let i = 0; i < text.length; i++) {
      high = Math.imul(high ^ text.charCodeAt(i), 2654435761);
      low = Math.imul(low ^ text.charCodeAt(i), 1597334677);
    }
    return `${high} ${low}`;
  };
  const style = (element) => {
    if (!styles.has(element)) {
      const has = getComputedStyle(element);
      styles.set(element, digest([style(element.parentElement), element.tagName, element.className, has.color,
        has.backgroundColor, has.backgroundImage, has.opacity, has.fontSize, has.fontWeight, has.textDecorationLine,
        has.position].join("|")));
    }
    return styles.get(element);
  };
  for (const element of document.body.querySelectorAll("*"))
    if ([...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim()) &&
        element.getClientRects().length && !old.has(style(element)) && !found.has(style(element)))
      found.set(style(element), element);
  window.textsOfNewStyles = [...found.values()];
  return [...found.keys()];
}
