// A formula or a table that is wider than its page scrolls; the keyboard then reaches it, and only then.
const observer = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
const observeAll = () => document.querySelectorAll(".formula, .md-typeset__scrollwrap").forEach((part) => observer.observe(part));
observeAll();
// The theme puts tables into a box that scrolls once the page is there.
new MutationObserver(observeAll).observe(document.body, { childList: true, subtree: true });
