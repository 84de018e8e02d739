import { empty, fill } from "../dom.js";

export function mount(root, context) {
  fill(root, empty("Nothing is shown here yet."));
  return { refresh() {}, unmount() {} };
}
