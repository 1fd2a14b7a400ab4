// A formula that is wider than its page scrolls; the keyboard then reaches it, and only then.
const observer = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
document.querySelectorAll(".formula").forEach((formula) => observer.observe(formula));
