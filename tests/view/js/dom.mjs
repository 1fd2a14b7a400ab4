// As much of a document as a panel needs: elements with children, attributes, texts, events, and simple selectors.

class Element extends EventTarget {
  constructor(tag) {
    super();
    Object.assign(this, { localName: tag, children: [], attributes: new Map(), className: "", hidden: false, disabled: false, open: false, tabIndex: -1, parent: null });
    this.style = { setProperty: (name, value) => (this.style[name] = value) };
    this.classList = { add: (name) => (this.className = `${this.className} ${name}`.trim()), contains: (name) => this.className.split(" ").includes(name) };
    if (tag === "details" || tag === "dialog") this.open = false;
  }
  get textContent() {
    return this.children.map((child) => (typeof child === "string" ? child : child.textContent)).join("");
  }
  setAttribute(name, value) {
    this.attributes.set(name, value);
    if (name === "class") this.className = value;
  }
  getAttribute(name) {
    return this.attributes.get(name) ?? null;
  }
  append(...children) {
    for (const child of children) if (child instanceof Element) child.parent = this;
    this.children.push(...children.map((child) => (child instanceof Element ? child : String(child))));
  }
  prepend(...children) {
    const before = this.children.splice(0);
    this.append(...children, ...before);
  }
  replaceChildren(...children) {
    this.children = [];
    this.append(...children);
  }
  remove() {
    if (this.parent) this.parent.children = this.parent.children.filter((child) => child !== this);
    this.parent = null;
  }
  *all() {
    for (const child of this.children) {
      if (!(child instanceof Element)) continue;
      yield child;
      yield* child.all();
    }
  }
  // A tag, a class, or both, with ":enabled" or "[open]" behind.
  matches(selector) {
    const [, tag, name, rest] = /^(\w*)(?:\.([\w-]+))?(:enabled|\[open\])?$/.exec(selector);
    return (!tag || tag === this.localName) && (!name || this.classList.contains(name)) && (rest !== ":enabled" || !this.disabled) && (rest !== "[open]" || this.open);
  }
  querySelectorAll(selector) {
    return [...this.all()].filter((element) => element.matches(selector));
  }
  querySelector(selector) {
    return this.querySelectorAll(selector)[0] ?? null;
  }
  get firstElementChild() {
    return this.children.find((child) => child instanceof Element) ?? null;
  }
  showModal() {
    this.open = true;
  }
  close() {
    this.open = false;
    this.dispatchEvent(new Event("close"));
  }
  click() {
    this.dispatchEvent(new Event("click"));
  }
  focus() {
    globalThis.document.activeElement = this;
  }
  get scrollWidth() {
    return 100;
  }
  get clientWidth() {
    return 400;
  }
  get offsetWidth() {
    return 20;
  }
  get offsetHeight() {
    return 112;
  }
  get offsetLeft() {
    return 20 * (this.parent?.children.indexOf(this) ?? 0);
  }
}

/** Put a document, and what measures elements, where a page has them; returns an element to mount in. */
export function createDocument() {
  globalThis.document = { activeElement: null, createElement: (tag) => new Element(tag), createElementNS: (_, tag) => new Element(tag) };
  globalThis.ResizeObserver = class {
    observe() {}
    disconnect() {}
  };
  return new Element("div");
}

/** Wait until all promises that need no more than others have told so. */
export const settled = () => new Promise((done) => setTimeout(done, 5));

/** Wait until a condition holds. */
export async function until(holds) {
  for (let tries = 0; !holds(); tries++) {
    if (tries > 2000) throw new Error(`not so: ${holds}`);
    await settled();
  }
}
