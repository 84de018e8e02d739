// Samples: the list of groups (#/samples?…), a group (#/samples/GROUP), one of its samples (#/samples/GROUP/INDEX).

import { mountGroup } from "./samples_group.js";
import { mountList } from "./samples_list.js";
import { mountSample } from "./samples_sample.js";

const VIEWS = [mountList, mountGroup, mountSample];

export function mount(root, context) {
  let view = null;
  let depth = -1;

  function navigate(next) {
    const wanted = Math.min(next.rest.length, 2);
    if (wanted === depth && view.navigate) {
      view.navigate(next);
      return;
    }
    view?.unmount();
    depth = wanted;
    view = VIEWS[wanted](root, next);
    window.scrollTo(0, 0);
  }

  navigate(context);
  return { navigate, refresh: () => view.refresh(), unmount: () => view.unmount() };
}
