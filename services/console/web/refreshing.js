// Loads a page's data again and again, never twice at a time: what changes meanwhile is loaded once more at the end.

/**
 * Returns `refresh()`, which runs `load(again)`; asked for while it runs, it runs once more afterwards, as when `load` calls `again()`.
 * What `load` throws goes to `failed`, but not once `signal` is aborted: the page is gone then.
 */
export function refreshing(load, signal, failed = () => {}) {
  let busy = false;
  let wanted = false;
  const again = () => (wanted = true);

  return async function refresh() {
    wanted = true;
    if (busy) return;
    busy = true;
    while (wanted && !signal.aborted) {
      wanted = false;
      try {
        await load(again);
      } catch (error) {
        if (!signal.aborted) failed(error);
      }
    }
    busy = false;
  };
}
