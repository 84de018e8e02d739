// Rewards for the quick start's sums: 1 where the last number of a response is the label, else 0; and whether it was worked.
import { createServer } from "node:http";

const description = { protocol: 1, name: "arithmetic-node", verbs: ["score"], timeout: 5 };

function score({ label, samples }) {
  const own = samples.map((sample) => ("label" in sample ? sample.label : label)); // a sample has its own where it is not the group's
  if (own.some((one) => typeof one !== "string")) throw new Error("a sum needs its label");
  return { rewards: samples.map(({ response }, index) => reward(response, Number(own[index]))) };
}

function reward(response, answer) {
  const last = response.match(/[-+]?\d{1,40}(?:\.\d{1,40})?/g)?.at(-1);
  return { reward: last !== undefined && Number(last) === answer ? 1 : 0, worked: response.startsWith("(") ? 1 : 0 };
}

async function body(request) {
  const pieces = [];
  for await (const piece of request) pieces.push(piece);
  return JSON.parse(Buffer.concat(pieces).toString("utf8"));
}

const server = createServer(async (request, response) => {
  const answer = (status, value) => response.writeHead(status, { "Content-Type": "application/json" }).end(JSON.stringify(value));
  try {
    if (request.method === "GET" && request.url === "/describe") answer(200, description);
    else if (request.method === "POST" && request.url === "/score") answer(200, score(await body(request)));
    else answer(404, { error: `there is no ${request.method} ${request.url}` });
  } catch (error) {
    answer(400, { error: error.message });
  }
});

process.on("SIGTERM", () => process.exit(0));
server.listen(Number(process.env.PORT ?? 8080), process.env.HOST, () => console.log(`listening on ${server.address().port}`));
