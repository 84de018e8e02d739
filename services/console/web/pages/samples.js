// Samples: the list of groups (#/samples?…), a group (#/samples/GROUP), one of its samples (#/samples/GROUP/INDEX), and the sessions
// that agents play now (#/samples/sessions).

import { mountGroup } from "./samples_group.js";
import { mountList } from "./samples_list.js";
import { mountSample } from "./samples_sample.js";
import { mountSessions } from "./samples_sessions.js";

const SESSIONS = "sessions"; // the id of no group
const VIEWS = [mountList, mountGroup, mountSample];

export function mount(root, context) {
  let view = null;
  let shown = null;

  function navigate(next) {
    const wanted = next.rest[0] === SESSIONS ? mountSessions : VIEWS[Math.min(next.rest.length, 2)];
    if (wanted === shown && view.navigate) {
      view.navigate(next);
      return;
    }
    view?.unmount();
    shown = wanted;
    view = wanted(root, next);
    window.scrollTo(0, 0);
  }

  navigate(context);
  return { navigate, refresh: () => view.refresh(), unmount: () => view.unmount() };
}
