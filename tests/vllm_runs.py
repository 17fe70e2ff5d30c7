"""Runs on a real vLLM, and what came of them, for the tests that compare one run with another.

A run is seven requests on four slots, so that some wait; sampling is seeded and the outputs
differ from each other. `Delivered` keeps what a caller was handed, as it was at that moment.
"""

from collections import defaultdict
from itertools import islice

from tests.engines import core, model_dir, worker

KINDS = ("CUMULATIVE", "DELTA", "FINAL_ONLY")
MIXED = tuple(tuple(KINDS[(index + shift) % 3] for index in range(3)) for shift in range(3))
ALONE = tuple((kind,) * 3 for kind in KINDS)
LEVELS = (0, 1, 2)
CRAMPED = {"max_num_seqs": 2, "num_gpu_blocks_override": 4}  # three blocks of 128 tokens can be used

# On four slots: "two" starts with one of its samples, the other and the last three wait.
REQUESTS = {
    "ant": {"max_tokens": 30},
    "bee": {"max_tokens": 27},
    "stop": {"max_tokens": 38},
    "two": {"max_tokens": 26, "n": 2},
    "cow": {"max_tokens": 28},
    "dog": {"max_tokens": 26},
    "elk": {"max_tokens": 29},
}


def params(name, kind, **options):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=1.0,
        seed=100 + 10 * list(REQUESTS).index(name) if name in REQUESTS else 7,
        ignore_eos=True,
        logprobs=1,
        output_kind=RequestOutputKind[kind],
        **options,
    )


def requests(kinds, stop, names=tuple(REQUESTS)):
    """These requests as (id, prompt, parameters); the kinds of output take turns."""
    for name in names:
        options = REQUESTS[name] | ({"stop": [stop]} if name == "stop" else {})
        yield name, f"the story of the {name} begins", params(name, kind_of(name, kinds), **options)


def kind_of(name, kinds):
    return kinds[list(REQUESTS).index(name) % 3]


def submit(engine, kinds, stop, names=tuple(REQUESTS)):
    add(engine, requests(kinds, stop, names))


def add(engine, wanted):
    for request in wanted:
        engine.add_request(*request)


class Delivered:
    """What a caller was handed, as it was at that moment, by request and sample."""

    def __init__(self):
        self.seen = defaultdict(list)
        self.logprobs = defaultdict(list)
        self.finished = []
        self.steps = 0
        self._buffered = []

    def take(self, outputs, *, buffered=False):
        for output in outputs:
            assert output.request_id not in self.finished, "an output after the last one"
            if output.finished:
                self.finished.append(output.request_id)
            for sample in output.outputs:
                key = output.request_id, sample.index
                self.seen[key].append(view(sample))
                self.logprobs[key] += logprobs(sample)
                if buffered:
                    self._buffered.append((sample, view(sample), logprobs(sample)))

    def finish(self, engine):
        """Step until all is delivered, then look again at what had waited in the mailbox."""
        while engine.has_unfinished_requests():
            lifecycle = getattr(engine, "_core", None)
            self.take(engine.step(), buffered=lifecycle is not None and bool(lifecycle.ledger.mailbox))
            self.steps += 1
        return self.look_again()

    def look_again(self):
        """What had to wait was a snapshot: it is still what it was when it was handed out."""
        for sample, as_delivered, logprobs_then in self._buffered:
            assert view(sample) == as_delivered
            assert logprobs(sample) == logprobs_then
        return self

    def tokens(self, kinds):
        """All token ids by request and sample."""
        result = {}
        for key, views in self.seen.items():
            parts = views if kind_of(key[0], kinds) == "DELTA" else views[-1:]
            result[key] = [token for ids, *_ in parts for token in ids]
        return result

    def text(self, kinds, key):
        delta = kind_of(key[0], kinds) == "DELTA"
        return "".join(text for _, text, *_ in (self.seen[key] if delta else self.seen[key][-1:]))

    def prefixes(self, kinds, key):
        """All that was known after each output: ids, text, reasons, log probabilities."""
        delta, left = kind_of(key[0], kinds) == "DELTA", iter(self.logprobs[key])
        ids, text, probs = (), "", ()
        for new_ids, new_text, *reasons in self.seen[key]:
            new_probs = tuple(islice(left, len(new_ids)))
            if delta:
                ids, text, probs = ids + new_ids, text + new_text, probs + new_probs
            else:
                ids, text, probs = new_ids, new_text, new_probs
            yield ids, text, *reasons, probs


def view(sample):
    return tuple(sample.token_ids), sample.text, sample.finish_reason, sample.stop_reason


def logprobs(sample):
    return [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]


def assert_same(got, expected):
    assert got.seen.keys() == expected.seen.keys()
    for key, views in expected.seen.items():
        assert got.seen[key] == views, key
        pairs = zip(got.logprobs[key], expected.logprobs[key], strict=True)
        assert max(abs(one - other) for one, other in pairs) <= 1e-4, key
    assert sorted(got.finished) == sorted(expected.finished)


def assert_same_but_merged(got, expected, kinds):
    """As `assert_same`, where several outputs in a row may have come as one."""
    assert got.seen.keys() == expected.seen.keys()
    for key in expected.seen:
        known = list(expected.prefixes(kinds, key))
        left = iter(known)
        prefixes = list(got.prefixes(kinds, key))
        assert all(any(is_same(prefix, other) for other in left) for prefix in prefixes), key
        assert is_same(prefixes[-1], known[-1]), key
    assert sorted(got.finished) == sorted(expected.finished)


def assert_all_fates(reports, mode):
    """The sleeps came at moments that matter: with something to drain and to hold, or to keep."""
    drained, held, kept = (
        sum(bool(getattr(report, fate)) for report in reports) for fate in ("drained", "held", "kept")
    )
    if mode == "wait":
        assert drained > len(reports) / 2
        assert held > len(reports) / 3
        assert not kept
    else:
        assert kept >= len(reports) - 2
        assert not drained


def is_same(prefix, other):
    *words, probs = prefix
    *other_words, other_probs = other
    if words != other_words:
        return False
    return all(abs(a - b) <= 1e-4 for a, b in zip(probs, other_probs, strict=True))


def raw(llm):
    """The engine behind whatever stands in for it."""
    return getattr(llm.llm_engine, "_guarded_engine", llm.llm_engine)


def load_unseen(llm):
    """Put the checkpoint's weights back as a trainer does: parameter by parameter, past every guard."""
    from safetensors.torch import load_file

    model = worker(llm).model_runner.model
    for item in load_file(model_dir() / "model.safetensors").items():
        model.load_weights([item])


class Uninterrupted:
    """Runs on the plain engine, one for each way that the kinds of output are mixed."""

    def __init__(self, llm):
        self.stop = self._find_stop(llm.llm_engine)
        self.runs = {}
        for kinds in (*MIXED, *ALONE):
            submit(llm.llm_engine, kinds, self.stop)
            self.runs[kinds] = Delivered().finish(llm.llm_engine)
        self.steps = self.runs[MIXED[0]].steps

    @staticmethod
    def _find_stop(engine):
        """Two plain characters that appear late in what "stop" would say, and not before."""
        submit(engine, ALONE[2], "never said")
        text = Delivered().finish(engine).text(ALONE[2], ("stop", 0))
        pairs = (text[at : at + 2] for at in range(26, len(text) - 1))
        return next(pair for pair in pairs if pair.isascii() and pair.isprintable() and text.find(pair) > 24)

    def __getitem__(self, kinds):
        return self.runs[kinds]


def spy_on_schedule(llm, monkeypatch):
    steps = []
    scheduler = core(llm).scheduler
    real = scheduler.schedule

    def schedule(*args, **kwargs):
        output = real(*args, **kwargs)
        steps.append(set(output.num_scheduled_tokens))
        return output

    monkeypatch.setattr(scheduler, "schedule", schedule)
    return steps


def name_and_sample(internal_id):
    """("two", 1) of "1_two-5f3c..."."""
    name = internal_id.rpartition("-")[0]
    index, _, base = name.rpartition("_")
    return base, int(index or 0)


def started(steps):
    """The caller's ids of everything that these steps scheduled."""
    return {name_and_sample(internal_id)[0] for step in steps for internal_id in step}


def times_scheduled(steps):
    """In how many steps each sample was scheduled: one token each, where nothing is preempted."""
    counts = defaultdict(int)
    for step in steps:
        for internal_id in step:
            counts[name_and_sample(internal_id)] += 1
    return counts


class Recorder:
    """Stands in for the client of the engine core, and lists the calls that get through."""

    def __init__(self, client):
        self._client = client
        self.calls = []

    def __getattr__(self, name):
        value = getattr(self._client, name)
        if not callable(value):
            return value

        def call(*args, **kwargs):
            self.calls.append(name)
            return value(*args, **kwargs)

        return call


def four_samples():
    """On two slots: a request that can start only in part, and one that waits for it."""
    yield "two", "a story told in four ways", params("two", "FINAL_ONLY", n=4, max_tokens=26)
    yield "ant", "a story that waits for them", params("ant", "DELTA", max_tokens=30)


def long_prompts():
    """On two slots and three blocks of KV cache: one of them loses its place."""
    for name in ("ant", "bee", "cow"):
        options = params(name, "CUMULATIVE", max_tokens=REQUESTS[name]["max_tokens"])
        yield name, f"{name}: {'long ' * 22}", options


def fail_after(llm, monkeypatch, steps):
    """The model's forward pass raises once, after this many good steps."""
    executor = core(llm).model_executor
    real = executor.execute_model
    left = [steps]

    def execute_model(*args, **kwargs):
        left[0] -= 1
        if left[0] == -1:
            msg = "injected"
            raise RuntimeError(msg)
        return real(*args, **kwargs)

    monkeypatch.setattr(executor, "execute_model", execute_model)


def clear(llm):
    """Clear a failed engine by hand: the injected failure broke nothing in the workers."""
    engine = raw(llm)
    front = engine.output_processor
    engine.abort_request([*front.request_states, *front.parent_requests], internal=True)
    while core(llm).scheduler.has_requests() or core(llm).batch_queue:
        engine.step()


def check_partial(got, run, kinds, count, ended):
    """Everything delivered is the beginning of what it would have been, and ended as an error."""
    whole = run[kinds].tokens(kinds)
    for key, tokens in got.tokens(kinds).items():
        assert tokens == whole[key][: count[key]], key
        if key[0] in ended and len(tokens) < len(whole[key]):
            assert got.seen[key][-1][2] == "error"
    assert set(ended) <= set(got.finished)


def check_aborted(got, run, kinds, count):
    """Everything ended, with exactly the tokens that it had when it was aborted."""
    whole, plain = run[kinds].tokens(kinds), run[ALONE[0]]
    assert sorted(got.finished) == sorted(REQUESTS)
    assert got.seen.keys() == whole.keys()
    for key, tokens in got.tokens(kinds).items():
        assert tokens == whole[key][: count[key]], key
        if len(tokens) < len(whole[key]):
            assert got.seen[key][-1][2] == "abort"
        if tokens and key[0] != "stop":
            assert got.text(kinds, key) == plain.seen[key][len(tokens) - 1][1]
