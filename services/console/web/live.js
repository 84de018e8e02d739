// The feed of changes: one connection while the tab is seen, restored whenever it breaks or falls silent.

const SILENT_MS = 15000;
const AGAIN_MS = 2000;

/**
 * Calls `onChange(pages)` with the names of the pages whose data has changed, and `onState(connected)` when that changes.
 * Returns a function that ends it.
 */
export function follow(onChange, onState) {
  const known = {};
  let source = null;
  let timer = null;
  let ended = false;

  function alive() {
    clearTimeout(timer);
    timer = setTimeout(lost, SILENT_MS);
    onState(true);
  }

  function lost() {
    onState(false);
    close();
    if (!ended && !document.hidden) timer = setTimeout(open, AGAIN_MS);
  }

  function close() {
    clearTimeout(timer);
    source?.close();
    source = null;
  }

  function open() {
    close();
    timer = setTimeout(lost, SILENT_MS);
    source = new EventSource("/api/events");
    source.addEventListener("message", (event) => {
      alive();
      const revisions = JSON.parse(event.data);
      const changed = Object.keys(revisions).filter((page) => known[page] !== revisions[page]); // all at first: the tab may have been hidden for long
      Object.assign(known, revisions);
      if (changed.length) onChange(changed);
    });
    source.addEventListener("heartbeat", alive);
    source.addEventListener("error", lost);
  }

  function onVisible() {
    if (document.hidden) close(); // a browser has six connections to a host, and each tab would hold one
    else if (source === null) open();
  }

  document.addEventListener("visibilitychange", onVisible);
  if (!document.hidden) open();
  return () => {
    ended = true;
    document.removeEventListener("visibilitychange", onVisible);
    close();
  };
}
