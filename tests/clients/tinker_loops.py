"""The Tinker SDK as it is, against `myxo serve`: loops in the shape of the cookbook's. Prints what came of them as JSON.

python tinker_loops.py URL MODEL LOOP [STEPS]
"""

import json
import pathlib
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import tinker
from tinker import types

URL, MODEL, LOOP = sys.argv[1:4]
STEPS = int(sys.argv[4]) if len(sys.argv) > 4 else 10
KEY = "tml-0123456789abcdefghij"
DIGITS = range(20, 30)  # tokens of the characters 0 to 9 in the tiny model's vocabulary
EQUALS, PLUS = 33, 15


def tensor(data, dtype="float32"):
    return types.TensorData(data=list(data), dtype=dtype, shape=[len(data)])


def datum(tokens, **inputs):
    given = {name: tensor(values) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tensor(tokens[1:], "int64"), **given}
    )


def question(left, right):
    return [DIGITS[left], PLUS, DIGITS[right], EQUALS]


def client_of(service, seed=1):
    return service.create_lora_training_client(base_model=MODEL, rank=8, seed=seed).result()


def supervised(service):
    """Learns one-digit sums by cross-entropy on the answer alone."""
    client, losses = client_of(service), []
    data = [datum([*question(a, b), DIGITS[a + b]], weights=[0, 0, 0, 1]) for a in range(4) for b in range(4)]
    for _ in range(STEPS):
        passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(types.AdamParams(learning_rate=2e-2))
        losses.append(passed.result().metrics["loss:sum"] / len(data))
        stepped.result()
    return losses


def whole(service):
    """Trains all weights on one-digit sums; base and trained weights are sampled in turns. A second client is refused meanwhile."""
    client, losses, base = client_of(service), [], service.create_sampling_client(base_model=MODEL).result()
    print("begun", flush=True)
    data = [datum([*question(a, b), DIGITS[a + b]], weights=[0, 0, 0, 1]) for a in range(4) for b in range(4)]
    text = types.ModelInput.from_ints([*question(2, 3), DIGITS[5]])
    before = base.compute_logprobs(text).result()
    try:
        second = str(client_of(service))
    except Exception as error:
        second = f"{getattr(error, 'category', '')}: {error}"
    for step in range(STEPS):
        passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passed.result().metrics["loss:sum"] / len(data))
        stepped.result()
        if step == STEPS // 2:
            client.load_state_with_optimizer(client.save_state("half").result().path).result()
    sampler, params = client.save_weights_and_get_sampling_client().result(), types.SamplingParams(max_tokens=1, temperature=0.0)
    asked = [sampler.sample(types.ModelInput.from_ints(question(a, b)), 1, params) for a in range(4) for b in range(4)]
    answers = [list(future.result().sequences[0].tokens) for future in asked]
    own = (
        client.forward([datum([*question(2, 3), DIGITS[5]], weights=[1] * 4)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    )
    apart = max(abs(a - float(b)) for a, b in zip(sampler.compute_logprobs(text).result()[1:], own, strict=True))
    same = base.compute_logprobs(text).result() == before
    service.close("success").result()
    return {"losses": losses, "answers": answers, "apart": apart, "same": same, "second": second}


def reinforced(service):
    """Learns to answer with a digit that is right: reward 1 for the sum, 0.3 for another digit; advantages within a group."""
    client, rewards = client_of(service), []
    prompts = [question(1, 2), question(2, 2)]
    for step in range(STEPS):
        sampler, data, got = client.save_weights_and_get_sampling_client().result(), [], []
        params = types.SamplingParams(max_tokens=1, temperature=1.0, seed=step)
        asked = [
            (sampler.sample(types.ModelInput.from_ints(prompt), 32, params), prompt, want)
            for prompt, want in zip(prompts, (3, 4), strict=True)
        ]
        for future, prompt, want in asked:
            answers = future.result().sequences
            scores = [1.0 if one.tokens[0] == DIGITS[want] else 0.3 * (one.tokens[0] in DIGITS) for one in answers]
            mean = sum(scores) / len(scores)
            got += scores
            for one, score in zip(answers, scores, strict=True):
                rest = [0.0] * (len(prompt) - 1)
                data.append(datum([*prompt, one.tokens[0]], logprobs=[*rest, one.logprobs[0]], advantages=[*rest, score - mean]))
        rewards.append(sum(got) / len(got))
        passed, stepped = client.forward_backward(data, "importance_sampling"), client.optim_step(types.AdamParams(learning_rate=1e-2))
        passed.result()
        stepped.result()
    return rewards


def preferred(service):
    """Learns to prefer one answer to another (DPO), by a loss of the client's own."""
    import torch

    client, margins = client_of(service), []
    pairs = [tokens for a in range(4) for tokens in ([*question(a, 1), DIGITS[a + 1]], [*question(a, 1), DIGITS[9]])]
    data = [datum(tokens, weights=[0, 0, 0, 1]) for tokens in pairs]
    reference = [float(one["logprobs"].data[-1]) for one in client.forward(data, "cross_entropy").result().loss_fn_outputs]

    def loss(_, log_probs):
        gains = [values[-1] - before for values, before in zip(log_probs, reference, strict=True)]
        margin = torch.stack([good - bad for good, bad in zip(gains[::2], gains[1::2], strict=True)])
        return -torch.nn.functional.logsigmoid(0.5 * margin).sum(), {"margin": margin.mean().item()}

    for _ in range(STEPS):
        passed, stepped = client.forward_backward_custom(data, loss), client.optim_step(types.AdamParams(learning_rate=1e-2))
        margins.append(passed.result().metrics["margin"])
        stepped.result()
    return margins


def tracked(service, seed, client):
    """Returns all that a client gets that trains, saves and samples: its numbers are to be the same bits each time."""
    found, rng = [], random.Random(seed)
    for step in range(STEPS):
        data = [datum([rng.randrange(4, 99) for _ in range(rng.randrange(3, 20))]) for _ in range(3)]
        for one in data:
            one.loss_fn_inputs["weights"] = tensor([1.0] * one.model_input.length)
        passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(types.AdamParams(learning_rate=1e-2))
        passed = passed.result()
        log_probs = [value for one in passed.loss_fn_outputs for value in map(float, one["logprobs"].data)]
        found.append([f"step {step}, loss and log-probs", passed.metrics["loss:sum"], *log_probs])
        found.append([f"step {step}, metrics", *sorted(stepped.result().metrics.items())])
        if step % 3 == 1:  # between two checkpoints: steps that are refused, one of which drops its gradients
            data[0].loss_fn_inputs["weights"] = tensor([3e38] * data[0].model_input.length)
            client.forward_backward(data, "cross_entropy")
            refusals = [said(lambda: client.optim_step(types.AdamParams())) for _ in range(2)]
            found.append([f"step {step}, refusals", *(text.partition(" for self")[0] for text in refusals)])
        if step % 4 == 3:
            sampler = client.save_weights_and_get_sampling_client().result()
            answer = sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 2, types.SamplingParams(max_tokens=5, seed=3)).result()
            # an engine's log-probs depend in the last bit on its batch
            found.append([f"step {step}, samples", *(list(one.tokens) for one in answer.sequences)])
    saved = client.save_state("end").result().path
    again = service.create_training_client_from_state_with_optimizer(saved).result()
    passed = [one.forward([datum([5, 6, 7], weights=[1, 1])], "cross_entropy").result() for one in (client, again)]
    return [*found, ["the end, of the client and of its saved state", *(one.metrics["loss:sum"] for one in passed)]]


def alone(service):
    """Two clients, one after the other."""
    return [tracked(service, seed, client_of(service, seed)) for seed in (1, 2)]


def together(service):
    """The same two at once."""
    clients = {seed: client_of(service, seed) for seed in (1, 2)}
    print("begun", flush=True)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda seed: tracked(service, seed, clients[seed]), clients))
    service.close("success").result()
    return found


def refused(service):
    """What the server has not, in the SDK's own errors; and that the client goes on afterwards."""
    client = client_of(service)
    good, found = datum([5, 6, 7], weights=[1, 1]), {}
    outside, uneven = datum([5, 6, 700], weights=[1, 1]), datum([5, 6, 7], weights=[1])
    tried = {
        "loss": lambda: client.forward([good], "gspo"),
        "token": lambda: client.forward_backward([outside], "cross_entropy"),
        "shape": lambda: client.forward_backward([uneven], "cross_entropy"),
        "setting": lambda: client.forward([good], "cross_entropy", {"beta": 1.0}),
        "step": lambda: client.optim_step(types.AdamParams()),
        "name": lambda: client.save_state("../up"),
        "rank": lambda: service.create_lora_training_client(base_model=MODEL, rank=64),
        "model": lambda: service.create_lora_training_client(base_model="another", rank=8),
        "weights": lambda: service.create_training_client_from_state("tinker://other-0123456789abcdef:train:0/weights/x"),
        "key": lambda: tinker.ServiceClient(base_url=URL, api_key="tml-another-key-of-nobody").create_sampling_client(base_model=MODEL),
    }
    found |= {name: said(attempt) for name, attempt in tried.items()}
    found["after"] = client.forward([good], "cross_entropy").result().metrics["loss:sum"] > 0
    return found


def said(attempt):
    """Returns the error of an attempt; "accepted" without one."""
    try:
        attempt().result()
        return "accepted"
    except Exception as error:
        return f"{type(error).__name__} {getattr(error, 'category', '')}: {error}"


def got(future):
    """Returns what a future comes to; None where it is refused."""
    try:
        return future.result()
    except tinker.TinkerError:
        return None


def attacked(service):
    """What another tenant, and wrong requests, come to."""
    import httpx

    client, small = client_of(service), service.create_lora_training_client(base_model=MODEL, rank=4).result()
    bob = tinker.ServiceClient(base_url=URL, api_key="tml-bobs-0123456789abcdef")
    good, prompt = datum([5, 6, 7], weights=[1, 1]), types.ModelInput.from_ints([5, 6])
    state, sampled = client.save_state("x").result().path, client.save_weights_for_sampler("s", ttl_seconds=10**6).result().path
    model, sampler = state.split("/")[2], service.create_sampling_client(model_path=sampled).result()
    session = model.partition(":")[0]

    def posted(name, key="tml-bobs-0123456789abcdef", **body):
        answer = httpx.post(f"{URL}/api/v1/{name}", json=body, headers={"X-API-Key": key}, timeout=60)
        return f"{answer.status_code} {answer.text}"

    def asked(**settings):
        return lambda: sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2, **settings))

    def policy(**changed):
        inputs = {"logprobs": [0, 0], "advantages": [1, 1]} | changed
        return lambda: client.forward_backward([datum([5, 6, 7], **inputs)], "ppo")

    found = {
        "their_state": said(lambda: bob.create_training_client_from_state(state)),
        "their_sampler": said(lambda: bob.create_sampling_client(model_path=sampled)),
        "their_session": posted("create_model", session_id=session, model_seq_id=9, base_model=MODEL),
        "their_future": posted("retrieve_future", request_id=f"{model}/0"),
        "their_samples": posted("asample", sampling_session_id=f"{session}:sample:0", seq_id=99, prompt={"chunks": []}, sampling_params={}),
        "their_model": posted("optim_step", model_id=model, seq_id=1, adam_params={}),
        "rank": said(lambda: small.load_state(state)),
        "nan": said(policy(advantages=[1, float("nan")])),
        "lengths": said(policy(logprobs=[0])),
        "long_name": said(lambda: client.save_state("a" * 250)),
        "long_stop": said(asked(stop=["a" * 10**6])),
        "empty_stop": said(asked(stop="")),
        "same_number": posted("optim_step", KEY, model_id=model, seq_id=1, adam_params={"learning_rate": 1.0}),
    }
    expiring = service.create_sampling_client(model_path=client.save_weights_for_sampler("t", ttl_seconds=1).result().path)
    expiring, end = expiring.result(), time.monotonic() + 60
    while (late := said(lambda: expiring.sample(prompt, 1, types.SamplingParams(max_tokens=1)))) == "accepted":
        assert time.monotonic() < end
    found["expired"] = late
    found["whole_context"] = len(sampler.sample(prompt, 1, types.SamplingParams(top_k=10**12)).result().sequences[0].tokens)
    made = [bob.create_lora_training_client(base_model=MODEL, rank=8) for _ in range(4)]
    held = [client for client in map(got, made) if client is not None]
    saves = [held[0].save_state(name) for name in "abcd"] + [held[0].save_state("a", overwrite=True)]
    passed = [held[0].forward([datum([5] * 61, weights=[1] * 60)], "cross_entropy") for _ in range(20)]
    found["accepted"] = {"create_model": len(held), "forward": sum(got(future) is not None for future in passed)}
    found["accepted"]["save_state"] = [got(future) is not None for future in saves]
    bob.close("success").result()
    bob = tinker.ServiceClient(base_url=URL, api_key="tml-bobs-0123456789abcdef")
    found["accepted"]["again"] = len([bob.create_lora_training_client(base_model=MODEL, rank=8).result() for _ in range(2)])
    found["behind_unload"] = behind_unload(posted)
    client.forward([good], "cross_entropy").result()
    return found


def behind_unload(posted):
    """Returns what becomes of a state's loading that comes after its client's unload: one that is accepted before it."""
    session = json.loads(posted("create_session", KEY)[4:])["session_id"]
    posted("create_model", KEY, session_id=session, model_seq_id=0, base_model=MODEL)
    model = f"{session}:train:0"
    posted("save_weights", KEY, model_id=model, seq_id=1, path="x")
    posted("load_weights", KEY, model_id=model, seq_id=3, path=f"tinker://{model}/weights/x", optimizer=False)
    posted(f"sessions/{session}/finish", KEY)
    while (answer := posted("retrieve_future", KEY, request_id=f"{model}/3"))[:3] == "408":
        pass
    return answer


def given_up(service):
    """Samples from weights that an engine has loaded for a request that was given up."""
    path = client_of(service).save_weights_for_sampler("s").result().path
    print(path, flush=True)
    end = time.monotonic() + 60
    while not pathlib.Path("loaded").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    sampler = service.create_sampling_client(model_path=path).result()
    return len(sampler.sample(types.ModelInput.from_ints([5, 6]), 1, types.SamplingParams(max_tokens=1)).result(timeout=30).sequences)


def broken(service):
    """A state that cannot be written, and one that cannot be read."""
    client = client_of(service)
    path = client.save_state("good").result().path
    saved = next(pathlib.Path().rglob(f"clients/weights/{path.split('/')[2]}"))
    (saved / ".x.partial").write_text("in the way")
    found = {"written": said(lambda: client.save_state("x")), "saved": client.save_state("y").result().path}
    (saved / "good" / "rank-0.safetensors").write_bytes(b"broken")
    found["read"] = said(lambda: service.create_training_client_from_state_with_optimizer(path))
    return found | {"loss": client.forward([datum([5, 6, 7], weights=[1, 1])], "cross_entropy").result().metrics["loss:sum"]}


if __name__ == "__main__":
    loops = {
        each.__name__: each for each in (supervised, whole, reinforced, preferred, alone, together, refused, attacked, given_up, broken)
    }
    print(json.dumps(loops[LOOP](tinker.ServiceClient(base_url=URL, api_key=KEY))))
