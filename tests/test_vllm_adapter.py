"""The adapter, on stand-ins for what a CPU cannot show: device memory, ranks, other releases."""

import os
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture
def adapter():
    from engine_adapter import vllm_inprocess

    return vllm_inprocess


class Rank:
    """A worker: its device memory in bytes, the allocations in vLLM's pool, and its model's parameters."""

    def __init__(self, free=50, total=100, allocations=(), parameters=()):
        self.free, self.total = free, total
        self.allocations = list(allocations)
        self.parameters = dict(parameters)
        self.emptied = 0

    def get_model(self):
        return SimpleNamespace(
            named_parameters=lambda: [
                (name, SimpleNamespace(data=data)) for name, data in self.parameters.items()
            ]
        )


def allocation(tag, size, *, asleep=False, backup=None):
    return SimpleNamespace(tag=tag, handle=(0, size), is_asleep=asleep, cpu_backup_tensor=backup)


class FakeEngine:
    """The private surface of an in-process `LLMEngine`, over these ranks."""

    def __init__(self, *ranks, **config):
        self.ranks = ranks or (Rank(),)
        self.log = []
        executor = SimpleNamespace(sleeping_tags=set())
        self.scheduler = SimpleNamespace(
            running=[],
            requests={},
            pause_state=None,
            has_requests=lambda: False,
            set_pause_state=self._set_pause_state,
        )
        core = SimpleNamespace(scheduler=self.scheduler, model_executor=executor, batch_queue=None)
        self.executor = executor
        self.engine_core = SimpleNamespace(engine_core=core, collective_rpc=self._collective_rpc)
        self.output_processor = SimpleNamespace(request_states={}, parent_requests={}, external_req_ids={})
        self.input_processor = SimpleNamespace(process_inputs=self._process_inputs)
        self.vllm_config = SimpleNamespace(
            load_config=SimpleNamespace(load_format=config.get("load_format", "auto")),
            model_config=SimpleNamespace(enable_sleep_mode=config.get("enable_sleep_mode", True)),
            parallel_config=SimpleNamespace(
                data_parallel_size=config.get("data_parallel_size", 1),
                world_size=config.get("world_size", len(self.ranks)),
                distributed_executor_backend=config.get("backend", "uni"),
            ),
        )
        from vllm.v1.core.sched.interface import PauseState

        self.scheduler.pause_state = PauseState.UNPAUSED

    def _set_pause_state(self, state):
        self.scheduler.pause_state = state
        self.log.append(state.name)

    def _collective_rpc(self, function, *args, **kwargs):
        results = []
        for rank in self.ranks:
            self.rank = rank
            results.append(function(rank, *args, **kwargs))
        return results

    def _process_inputs(self, request_id, prompt, params, arrival_time=None, priority=0):
        self.log.append(("process_inputs", request_id, arrival_time, priority))

    def get_supported_tasks(self):
        return ("generate",)

    def wake_up(self, tags):
        self.log.append(("wake_up", tags))
        self.executor.sleeping_tags.difference_update(tags)

    def reset_prefix_cache(self):
        self.log.append("reset_prefix_cache")
        return self.drops_cache

    drops_cache = True


@pytest.fixture
def gpu(adapter, monkeypatch):
    """Makes adapters over ranks that have device memory."""
    made = []

    def make(*ranks, **config):
        engine = FakeEngine(*ranks, **config)
        made.append(engine)
        return adapter.VllmInprocess(engine), engine

    def rank():
        return made[-1].rank if made and hasattr(made[-1], "rank") else Rank()

    platform = SimpleNamespace(
        is_cuda_alike=lambda: True, is_sleep_mode_available=lambda: True, device_name="fake"
    )
    monkeypatch.setattr(adapter, "current_platform", platform)
    monkeypatch.setattr(adapter, "_allocations", lambda: rank().allocations)
    monkeypatch.setattr(adapter.torch.cuda, "mem_get_info", lambda: (rank().free, rank().total))

    def empty_cache():
        rank().emptied += 1
        rank().free += rank().cached if hasattr(rank(), "cached") else 0

    monkeypatch.setattr(adapter.torch.cuda, "empty_cache", empty_cache)
    return make


# -- device memory -------------------------------------------------------------------------------------


def test_memory_is_summed_over_ranks(gpu):
    """Used is what the driver says; asleepable is what vLLM's pool has mapped; both over all ranks."""
    engine, _ = gpu(
        Rank(30, 100, [allocation("weights", 20), allocation("kv_cache", 10)]),
        Rank(60, 100, [allocation("weights", 5), allocation("kv_cache", 7, asleep=True)]),
    )
    memory = engine.memory()
    assert (memory.device, memory.asleepable) == (70 + 40, 30 + 5)
    assert memory.host > 2**20


def test_memory_without_a_pool_cannot_be_told_asleepable(gpu):
    """Without the pool nothing is known to be able to sleep; with all of it asleep, nothing more is: 0."""
    engine, _ = gpu(Rank(30, 100))
    assert (engine.memory().device, engine.memory().asleepable) == (70, None)
    engine, _ = gpu(Rank(30, 100, [allocation("weights", 20, asleep=True)]))
    assert engine.memory().asleepable == 0


def test_a_cpu_has_no_device_memory(adapter):
    """Where there is no device nothing is claimed of it."""
    engine = adapter.VllmInprocess(FakeEngine(Rank()))
    assert (engine.memory().device, engine.memory().asleepable) == (None, None)
    assert list(adapter._allocations()) == []


@pytest.mark.parametrize("instance", [None, "one"])
def test_allocations_are_those_of_the_pool_if_there_is_one(adapter, monkeypatch, instance):
    """Asking for the pool must not make one."""
    import sys

    data = [allocation("weights", 1)]

    class CuMemAllocator:
        @classmethod
        def get_instance(cls):
            assert cls.instance, "made a pool only to look"
            return SimpleNamespace(pointer_to_data={7: data[0]})

    CuMemAllocator.instance = instance
    fake = SimpleNamespace(CuMemAllocator=CuMemAllocator)
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", fake)
    monkeypatch.setattr(adapter, "current_platform", SimpleNamespace(is_cuda_alike=lambda: True))
    assert list(adapter._allocations()) == (data if instance else [])


@pytest.mark.parametrize("short", [0, 1])
def test_a_wake_looks_first_whether_the_memory_is_there(gpu, short):
    """Nothing is mapped unless every rank has room for these tags; the worst rank's lack is named."""
    from lifecycle.engine import OutOfDeviceMemory

    asleep = [allocation("weights", 20, asleep=True), allocation("weights", 10, asleep=True)]
    asleep += [allocation("kv_cache", 50, asleep=True), allocation("weights", 99)]
    engine, fake = gpu(Rank(40, 100, asleep), Rank(30 - short, 100, asleep))
    if short:
        with pytest.raises(OutOfDeviceMemory) as missing:
            engine.wake_up(["weights"])
        assert missing.value.missing_bytes == 1
        assert not [entry for entry in fake.log if entry[0] == "wake_up"]
        assert [rank.emptied for rank in fake.ranks] == [1, 1]
    else:
        engine.wake_up(["weights"])
        assert ("wake_up", ["weights"]) in fake.log
        assert [rank.emptied for rank in fake.ranks] == [0, 0]
        assert fake.log[-1] == "PAUSED_ALL"
    with pytest.raises(OutOfDeviceMemory) as missing:
        engine.wake_up(["weights", "kv_cache"])
    assert missing.value.missing_bytes == 50 + short


def test_cached_memory_is_given_back_before_a_wake_is_refused(gpu):
    """What torch only keeps in its cache is room."""
    rank = Rank(10, 100, [allocation("weights", 30, asleep=True)])
    rank.cached = 20
    engine, fake = gpu(rank)
    engine.wake_up(["weights"])
    assert rank.emptied == 1
    assert ("wake_up", ["weights"]) in fake.log


@pytest.mark.parametrize(
    ("backups", "level"), [((1, 1), 1), ((1, None), 2), ((None, None), 2), ((1, "nothing"), None)]
)
def test_the_level_of_a_sleep_that_others_made_is_read_from_the_pool(gpu, backups, level):
    """Level 1 keeps the weights aside on every rank, level 2 does not; without a pool it can't be read."""
    ranks = [
        Rank(50, 100, [] if backup == "nothing" else [allocation("weights", 9, asleep=True, backup=backup)])
        for backup in backups
    ]
    engine, fake = gpu(*ranks)
    fake.executor.sleeping_tags = {"weights", "kv_cache"}
    condition = engine.condition()
    assert (condition.level, condition.paused, condition.resident) == (level, True, frozenset())


def test_only_weights_aside_make_level_1(gpu):
    """A back-up of the KV cache says nothing of the weights."""
    engine, fake = gpu(
        Rank(
            50, 100, [allocation("weights", 9, asleep=True), allocation("kv_cache", 9, asleep=True, backup=1)]
        )
    )
    fake.executor.sleeping_tags = {"weights", "kv_cache"}
    assert engine.condition().level == 2
    fake.executor.sleeping_tags = {"kv_cache"}
    assert engine.condition().level is None


# -- what can't be guarded -----------------------------------------------------------------------------


INDISPENSABLE = (
    "engine_core.engine_core.scheduler.running",
    "engine_core.engine_core.scheduler.requests",
    "engine_core.engine_core.scheduler.set_pause_state",
    "engine_core.engine_core.scheduler.pause_state",
    "engine_core.engine_core.scheduler.has_requests",
    "engine_core.engine_core.batch_queue",
    "engine_core.engine_core.model_executor.sleeping_tags",
    "output_processor.request_states",
    "output_processor.parent_requests",
)


def test_what_cannot_be_guarded_is_refused(adapter):
    """Another process's engine, in-process data parallelism, and any indispensable part that is missing."""
    from lifecycle import UnsupportedEngine

    with pytest.raises(UnsupportedEngine, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        adapter.VllmInprocess(SimpleNamespace(engine_core=SimpleNamespace()))
    with pytest.raises(UnsupportedEngine, match="data parallelism"):
        adapter.VllmInprocess(FakeEngine(data_parallel_size=2))
    for path in INDISPENSABLE:
        fake = FakeEngine()
        *way, last = path.split(".")
        home = fake
        for name in way:
            home = getattr(home, name)
        delattr(home, last)
        with pytest.raises(UnsupportedEngine, match=path):
            adapter.VllmInprocess(fake)


def test_an_engine_or_arguments_not_both(adapter):
    """What to guard must be one thing."""
    with pytest.raises(TypeError, match="not both"):
        adapter.VllmInprocess(FakeEngine(), model="m")


@pytest.mark.parametrize(
    ("config", "capability", "value"),
    [
        ({"enable_sleep_mode": False}, "levels", (0,)),
        ({"enable_sleep_mode": True}, "levels", (0, 1, 2)),
        ({"world_size": 2, "backend": "external_launcher"}, "lockstep", True),
        ({"world_size": 1, "backend": "external_launcher"}, "lockstep", False),
        ({"world_size": 2, "backend": "mp"}, "lockstep", False),
    ],
)
def test_capabilities_follow_the_engines_configuration(gpu, config, capability, value):
    """Levels need the sleep mode; ranks that step together, each in its own process, are in lockstep."""
    engine, _ = gpu(Rank(), **config)
    assert getattr(engine.capabilities, capability) == value


def test_what_a_release_lacks_is_said(adapter):
    """Each optional part that is missing costs something, and the costs name it."""
    fake = FakeEngine()
    costs = adapter.VllmInprocess(fake).capabilities.costs
    assert adapter.OPTIONAL_SURFACE["input_processor.process_inputs"] not in costs
    assert adapter.OPTIONAL_SURFACE["set_weight_version"] in costs
    assert any("back to sleep" in cost for cost in costs)
    fake.set_weight_version = fake.reset_encoder_cache = fake.release_kv_cache_memory = lambda: None
    capabilities = adapter.VllmInprocess(fake).capabilities
    assert not set(adapter.OPTIONAL_SURFACE.values()) & set(capabilities.costs)
    assert capabilities.release_kv
    del fake.input_processor.process_inputs
    costs = adapter.VllmInprocess(fake).capabilities.costs
    assert adapter.OPTIONAL_SURFACE["input_processor.process_inputs"] in costs
    for name in ("set_weight_version", "reset_encoder_cache", "release_kv_cache_memory"):
        lacking = FakeEngine()
        for other in {"set_weight_version", "reset_encoder_cache", "release_kv_cache_memory"} - {name}:
            setattr(lacking, other, lambda: None)
        capabilities = adapter.VllmInprocess(lacking).capabilities
        assert [cost for cost in capabilities.costs if cost in adapter.OPTIONAL_SURFACE.values()] == [
            adapter.OPTIONAL_SURFACE[name]
        ]
        assert capabilities.release_kv == (name != "release_kv_cache_memory")


# -- weights -------------------------------------------------------------------------------------------


def test_weights_can_be_checked_where_every_parameter_on_every_rank_can_hold_nan(adapter):
    """Packed integers can't, an empty parameter has nothing to look at; asleep it is assumed until seen."""
    import torch

    good, packed = torch.ones(2), torch.ones(2, dtype=torch.int32)
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for ranks, checkable in (
        ([{str(kind): torch.ones(2, dtype=kind) for kind in floats}], True),
        ([{"a": good}, {"a": good}], True),
        ([{"a": good}, {"a": good, "b": packed}], False),
        ([{"a": good, "b": torch.empty(0)}], False),
    ):
        fake = FakeEngine(*(Rank(parameters=parameters) for parameters in ranks))
        capabilities = adapter.VllmInprocess(fake).capabilities
        assert capabilities.check_weights is checkable
        assert any("NaN" in cost for cost in capabilities.costs) is not checkable
        fake.executor.sleeping_tags = {"weights"}
        assert adapter.VllmInprocess(fake).capabilities.check_weights


def test_holes_are_named_once_whichever_ranks_have_them(adapter):
    """One NaN anywhere in a parameter is a hole; the names are in order, each once."""
    import torch

    def parameters():
        return {name: torch.ones(3) for name in ("a", "b", "c")}

    fake = FakeEngine(Rank(parameters=parameters()), Rank(parameters=parameters()))
    engine = adapter.VllmInprocess(fake)
    assert engine.missing_weights() == ()
    for rank, name in ((0, "c"), (1, "c"), (1, "b")):
        fake.ranks[rank].parameters[name][1] = float("nan")
    assert engine.missing_weights() == ("c", "b")
    engine.discard_weights()
    assert engine.missing_weights() == ("a", "b", "c")
    assert all(data.isnan().all() for rank in fake.ranks for data in rank.parameters.values())


@pytest.mark.parametrize(
    ("largest", "weights"), [(0.0005, "discarded"), (0.001, "discarded"), (0.002, "valid"), (-0.002, "valid")]
)
def test_a_dummy_load_is_seen_until_somebody_made_it_good(adapter, largest, weights):
    """A dummy load is tiny; one parameter that is not, on any rank, and they were loaded."""
    import torch

    dummy = {"a": torch.full((3,), 0.0001), "ids": torch.tensor([1000])}
    other = {"a": torch.tensor([0.0, largest, 0.0]), "ids": torch.tensor([1000])}
    fake = FakeEngine(Rank(parameters=dummy), Rank(parameters=other), load_format="dummy")
    engine = adapter.VllmInprocess(fake)
    assert engine.condition().weights == weights
    if weights == "valid":  # what was good once stays good, tiny or not
        other["a"].zero_()
        assert engine.condition().weights == "valid"
    real = adapter.VllmInprocess(FakeEngine(Rank(parameters=dummy)))
    assert real.condition().weights == "valid"


def test_dummy_weights_asleep_are_not_looked_at(adapter):
    """Asleep there is nothing to look at: a dummy load stays one."""
    import torch

    loaded = Rank(parameters={"a": torch.ones(3)})
    fake = FakeEngine(loaded, load_format=SimpleNamespace(value="dummy"))
    engine = adapter.VllmInprocess(fake)
    fake.executor.sleeping_tags = {"weights"}
    assert engine.condition().weights == "discarded"
    fake.executor.sleeping_tags = set()
    assert engine.condition().weights == "valid"


# -- caches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("has_encoder_cache", [True, False])
def test_the_encoder_cache_goes_with_the_prefix_cache(adapter, drops, has_encoder_cache):
    """Both are dropped, the second where a release has one, and only if the first was."""
    fake = FakeEngine()
    fake.drops_cache = drops
    if has_encoder_cache:
        fake.reset_encoder_cache = lambda: fake.log.append("reset_encoder_cache")
    assert adapter.VllmInprocess(fake).reset_caches() is drops
    expected = ["reset_prefix_cache", *(["reset_encoder_cache"] if drops and has_encoder_cache else [])]
    assert fake.log == expected


@pytest.mark.parametrize(
    ("renderer", "resets"),
    [
        (None, 0),
        (SimpleNamespace(), 0),
        (SimpleNamespace(mm_processor_cache=None), 0),
        (SimpleNamespace(mm_processor_cache="one"), 1),
    ],
)
def test_media_are_forgotten_only_where_they_are_remembered(adapter, renderer, resets):
    """A front end without a cache of media has nothing to forget."""
    fake = FakeEngine()
    fake.reset_mm_cache = lambda: fake.log.append("reset_mm_cache")
    if renderer is not None:
        fake.renderer = renderer
    adapter.VllmInprocess(fake).forget_media()
    assert fake.log == ["reset_mm_cache"] * resets


# -- scheduling ----------------------------------------------------------------------------------------


def test_scheduling_is_resumed_once(adapter):
    """Resuming what is not paused does nothing; the level is forgotten either way."""
    fake = FakeEngine()
    engine = adapter.VllmInprocess(fake)
    engine.resume_scheduling()
    assert fake.log == []
    engine.pause_scheduling()
    assert (engine.condition().paused, engine.condition().level) == (True, 0)
    engine.resume_scheduling()
    engine.resume_scheduling()
    assert fake.log == ["PAUSED_ALL", "UNPAUSED"]
    assert (engine.condition().paused, engine.condition().level) == (False, None)


def test_work_is_requests_or_launched_batches(adapter):
    """An empty queue is no work; what the scheduler still has, or a launched batch, is."""
    fake = FakeEngine()
    engine = adapter.VllmInprocess(fake)
    core = fake.engine_core.engine_core
    for queue, requests, work, launched in (
        (None, False, False, False),
        ([], False, False, False),
        (["batch"], False, True, True),
        (None, True, True, False),
    ):
        core.batch_queue = queue
        fake.scheduler.has_requests = lambda requests=requests: requests
        assert (engine.has_work(), engine.has_launched()) == (work, launched)


def test_a_sleep_of_an_older_release_is_paused_first(adapter):
    """Where `sleep` has no mode, scheduling is stopped before it; where it has, the mode is "keep"."""
    fake = FakeEngine()
    engine = adapter.VllmInprocess(fake)
    fake.sleep = lambda level: fake.log.append(("sleep", level))
    engine.sleep(1)
    assert fake.log == ["PAUSED_ALL", ("sleep", 1)]
    fake.log.clear()
    fake.sleep = lambda level, mode="abort": fake.log.append(("sleep", level, mode))
    engine.sleep(2)
    assert fake.log == [("sleep", 2, "keep")]
    fake.executor.sleeping_tags = {"weights"}
    assert engine.condition().level == 2


# -- requests ------------------------------------------------------------------------------------------


def test_arrival_is_that_of_the_call(adapter):
    """Given by the caller, by the prompt, or the time of the call; options at their default are dropped."""
    import time

    from vllm import SamplingParams

    engine = adapter.VllmInprocess(FakeEngine())

    def prepare(prompt, **options):
        return engine.prepare("r", prompt, SamplingParams(), options)

    assert prepare({"prompt": "p", "arrival_time": 5.0}).arrival_time == 5.0
    assert prepare({"prompt": "p", "arrival_time": 5.0}, arrival_time=3.0).arrival_time == 3.0
    assert prepare("p", arrival_time=0.5).arrival_time == 0.5
    for prompt in ("p", {"prompt": "p"}):
        assert abs(prepare(prompt, arrival_time=None).arrival_time - time.time()) < 60
    call = prepare("p", arrival_time=1.0, priority=0, lora_request=None, trace_headers={"a": "b"})
    assert call.options == {"trace_headers": {"a": "b"}}
    assert prepare("p", priority=-1).options == {"priority": -1}


def test_arguments_must_be_what_vllm_takes(adapter):
    """An id that is no string and parameters of another kind are refused as TypeError."""
    from vllm import PoolingParams, SamplingParams

    engine = adapter.VllmInprocess(FakeEngine())
    for bad in (7, None, b"r"):
        with pytest.raises(TypeError, match="request_id must be a string"):
            engine.prepare(bad, "p", SamplingParams(), {})
    for bad in (None, {}, "greedy"):
        with pytest.raises(TypeError, match="params must be"):
            engine.prepare("r", "p", bad, {})
    pooling = engine.prepare("r", "p", PoolingParams(), {})
    assert (pooling.samples, pooling.delta) == (1, False)


def test_validation_passes_on_what_the_release_takes(adapter):
    """The front end gets the arrival and the options that it knows; without one nothing is validated."""
    from vllm import SamplingParams

    fake = FakeEngine()
    engine = adapter.VllmInprocess(fake)
    call = engine.prepare("r", "p", SamplingParams(), {"arrival_time": 2.0, "priority": 4, "unknown": 1})
    engine.validate(call)
    assert fake.log == [("process_inputs", "r", 2.0, 4)]

    def refuses(*_, **__):
        raise ValueError("too long")

    fake.input_processor.process_inputs = refuses
    with pytest.raises(ValueError, match="too long"):
        engine.validate(call)
    del fake.input_processor.process_inputs
    fake.log.clear()
    adapter.VllmInprocess(fake).validate(call)
    assert fake.log == []


def test_asnapshot_of_parameters_shares_nothing_that_changes(adapter):
    """Containers are copied, empty ones shared only where the engine clones them before it changes them."""
    from vllm import SamplingParams

    params = SamplingParams(stop=["x"], logit_bias={1: 2.0}, max_tokens=3)
    mine = adapter._snapshot(params)
    assert mine == params
    assert mine is not params
    params.stop.append("y")
    params.logit_bias[2] = 1.0
    assert (mine.stop, mine.logit_bias, mine.max_tokens) == (["x"], {1: 2.0}, 3)
    assert adapter._snapshot(SamplingParams()).bad_words is not SamplingParams().bad_words
    kept = SamplingParams(stop=["x"])
    kept.skip_clone = True
    mine = adapter._snapshot(kept)
    assert mine == kept
    for name in mine.__struct_fields__:
        if isinstance(getattr(mine, name), (list, dict, set)):
            assert all(getattr(mine, name) is not empty for empty in adapter._EMPTY.values()), name
    plain = SimpleNamespace(stop=["x"])
    assert adapter._snapshot(plain).stop is not plain.stop


@pytest.mark.parametrize(
    ("request_", "never"),
    [
        ({}, True),
        ({"status": "WAITING_FOR_FSM"}, True),
        ({"status": "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"}, True),
        ({"status": "RUNNING"}, False),
        ({"status": "PREEMPTED"}, False),
        ({"num_computed_tokens": 1}, False),
        ({"num_output_tokens": 1}, False),
        ({"num_preemptions": 1}, False),
        (None, False),
    ],
)
def test_only_a_request_that_waits_and_has_nothing_never_ran(adapter, request_, never):
    """Computed, sampled or preempted once, or not known any more: it has started."""
    if request_ is not None:
        fields = {"num_computed_tokens": 0, "num_output_tokens": 0, "num_preemptions": 0, **request_}
        status = SimpleNamespace(name=fields.pop("status", "WAITING"))
        request_ = SimpleNamespace(status=status, **fields)
    assert bool(adapter._never_ran(request_)) is never


def test_a_delta_without_tokens_has_no_history(adapter):
    """Logprobs of tokens that were given before are cut; those of new tokens, and of other kinds, stay."""
    from vllm.sampling_params import RequestOutputKind

    def output(tokens, logprobs):
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)])

    delta, whole = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE
    assert adapter._without_history(output([], [1, 2]), delta).outputs[0].logprobs == []
    assert adapter._without_history(output([5], [1]), delta).outputs[0].logprobs == [1]
    assert adapter._without_history(output([], None), delta).outputs[0].logprobs is None
    assert adapter._without_history(output([], [1, 2]), whole).outputs[0].logprobs == [1, 2]


def test_bad_arguments_leave_as_value_errors_and_nothing_else_does(adapter):
    """Whatever class a release has for them; any other exception stays what it was."""
    broken = RuntimeError("broken")
    assert adapter._as_value_error(broken) is broken
    for kind in adapter._BAD_ARGUMENT:
        error = adapter._as_value_error(kind("bad"))
        assert type(error) is ValueError
        assert "bad" in str(error)


# -- the doctor ----------------------------------------------------------------------------------------


def test_the_doctor_says_what_this_release_has(adapter):
    """Versions, then each part that is used with yes; the installed release has them all."""
    import torch
    import vllm

    rows = dict(adapter.doctor())
    assert (rows["vllm"], rows["torch"]) == (vllm.__version__, str(torch.__version__))
    assert rows["platform"]
    answers = {name: answer for name, answer in rows.items() if name not in ("vllm", "torch", "platform")}
    assert set(answers.values()) == {"yes"}
    assert {"LLMEngine.sleep", "Scheduler.set_pause_state", "sleep again from partly awake"} <= set(answers)
    assert {"LLMEngine.reset_encoder_cache", "KV cache first after level 2"} <= set(answers)
    assert not [name for name in answers if "input_processor" in name]


def test_the_doctor_names_what_a_missing_part_costs(adapter, monkeypatch):
    """A part that a release lacks is missing, with the guarantee that is lost."""
    monkeypatch.delattr(adapter.LLMEngine, "reset_encoder_cache")
    monkeypatch.setattr(adapter.Executor, "is_sleeping", False, raising=False)
    rows = dict(adapter.doctor())
    cost = adapter.OPTIONAL_SURFACE["reset_encoder_cache"]
    assert rows["LLMEngine.reset_encoder_cache"] == f"missing: {cost}"
    assert rows["sleep again from partly awake"].startswith("missing")
    assert rows["KV cache first after level 2"].startswith("missing")
