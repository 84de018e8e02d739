// What pages say that are made of the ledger, where only the run's directory is left.

import { empty } from "./dom.js";

/** Returns why there is no `what` for this run; null where there is, or nothing is known yet. */
export async function withoutLedger(context, what) {
  const overview = await context.overview();
  if (overview === null || overview.live) return null;
  return empty(`${what} are told by the run's ledger and events, and those are not in this copy of its directory: they lie in its nats folder. Curves, pushes and kept responses are on the other pages.`);
}
