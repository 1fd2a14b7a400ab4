// One line over the map: what the head that is shown does, as far as its numbers tell.

import { make } from "./elements.js";
import { headName, percent } from "./numbers.js";

/** Mount the line. */
export function mountSays(element, { store }) {
  const name = make("b");
  const does = make("span");
  element.append(name, " ", does);
  const show = ({ info, heads, entry, head, second, compare }) => {
    const row = heads?.rows.find((each) => each.entry === entry && each.head === head);
    const [first] = row?.kinds ?? [];
    const kind = heads?.kinds?.[first];
    const value = kind && row.values[kind.measure];
    const share = typeof value === "number" ? `, ${percent(value)}` : "";
    name.textContent = `${headName(info, entry, head)}${first ? `: ${first}${share}` : ""}`;
    if (second && compare !== "none") {
      does.textContent = { side: "beside ", triangle: "below the diagonal, above it ", ratio: "divided by " }[compare] + headName(info, second.entry, second.head);
    } else does.textContent = kind ? kind.does : "";
    const column = heads?.columns.find((each) => each.name === kind?.measure);
    element.title = column ? `${percent(value)}: ${column.description}` : "";
  };
  show(store.state);
  const off = store.on(["heads", "entry", "head", "second", "compare"], show);
  return {
    destroy() {
      off();
      element.replaceChildren();
    },
  };
}
