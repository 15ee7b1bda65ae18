// What a reader of the page would complain of, as lines of text: charts that are not drawn, text that is cut, words that
// are broken, a page that is wider than its window. Waits until every chart that is not folded away is drawn.
async () => {
  const found = [], root = document.querySelector("article") || document.body;  // on the site, menus slide out of view
  const SLACK = 4;  // pixels: the padding of code at the end of a line
  const of = (node) => {
    const element = node.nodeType === Node.TEXT_NODE ? node.parentElement : node;
    const section = element.closest("section[id], header, nav, footer, article");
    return `${element.tagName.toLowerCase()} of ${section ? section.id || section.tagName.toLowerCase() : "the page"}`;
  };
  const seen = (element) => element.checkVisibility({checkVisibilityCSS: true}) && element.getClientRects().length > 0;
  const scrolls = (element) => {  // it or what it is in, so that a reader comes to the end of it
    for (let each = element; each && each !== document.body; each = each.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(each).overflowX)) return true;
    return false;
  };
  const area = (element) => { const {width, height} = element.getBoundingClientRect(); return width * height; };

  const places = () => [...document.querySelectorAll(".chart")].filter(seen);
  const drawn = (place) => [...place.querySelectorAll("svg.marks, canvas")].some((each) => area(each) > 2000);
  const until = Date.now() + 30000;
  while (!places().every(drawn) && Date.now() < until) await new Promise((next) => setTimeout(next, 20));
  for (const place of places()) {
    if (!drawn(place)) found.push(`chart ${place.id} is not drawn: ${place.textContent.slice(0, 200)}`);
    if (drawn(place) && !place.querySelector("[role=graphics-symbol], [role=graphics-object]"))
      found.push(`chart ${place.id} is empty`);
  }

  for (const image of document.images)
    if (seen(image) && !image.naturalWidth) found.push(`picture ${image.getAttribute("src")} is not there`);

  const page = document.documentElement;
  if (page.scrollWidth > page.clientWidth) found.push(`the page is ${page.scrollWidth} pixels wide, its window ${page.clientWidth}`);

  for (const element of root.querySelectorAll("*")) {
    if (element.closest("svg") || !element.clientWidth || !seen(element) || scrolls(element)) continue;
    if (element.scrollWidth <= element.clientWidth + SLACK || element.closest("[hidden], .vega-actions, .md-clipboard")) continue;
    if ([...element.children].some((each) => !scrolls(each) && each.scrollWidth > each.clientWidth + SLACK && each.clientWidth)) continue;
    found.push(`cut in ${of(element)}: ${element.scrollWidth} pixels in ${element.clientWidth}: ${element.textContent.trim().replace(/\s+/g, " ").slice(0, 80)}`);
  }
  for (const drawing of document.querySelectorAll("svg.marks, .picture svg")) {
    if (!seen(drawing)) continue;
    const all = drawing.getBoundingClientRect(), where = drawing.closest("[id]")?.id || of(drawing);
    const visible = (text) => /\w/.test(text.textContent) && getComputedStyle(text).opacity !== "0";
    const boxes = [...drawing.querySelectorAll("text")].filter(visible).map((text) => [text.textContent, text.getBoundingClientRect()]);
    boxes.forEach(([text, box], at) => {
      if (box.left < all.left - 1 || box.right > all.right + 1 || box.top < all.top - 1 || box.bottom > all.bottom + 1)
        found.push(`cut in ${where}: ${text}`);
      for (const [other, its] of boxes.slice(at + 1)) {
        if (other === text) continue;  // of two points of one place
        const wide = Math.min(box.right, its.right) - Math.max(box.left, its.left);
        const high = Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top);
        if (wide > 2 && high > 4) found.push(`one upon the other in ${where}: ${text} and ${other}`);
      }
    });
  }

  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  const top = (node, from, to) => { range.setStart(node, from); range.setEnd(node, to); return range.getClientRects(); };
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest("script, style, noscript, svg, pre") || !seen(parent)) continue;
    for (const {0: word, index} of node.data.matchAll(/[^\s\u200b]+/g)) {
      const rects = top(node, index, index + word.length);
      if (rects.length < 2) continue;
      for (let at = 1; at < word.length; at++) {
        const before = top(node, index + at - 1, index + at)[0], after = top(node, index + at, index + at + 1)[0];
        if (before && after && after.top > before.top + 2 && !/[\w)\]}.][-\/–—?]+$/.test(word.slice(0, at)))
          found.push(`broken in ${of(node)}: ${word.slice(0, at)}|${word.slice(at)}`);
      }
    }
  }
  return found;
}
