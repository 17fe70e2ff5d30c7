"""The adapter, on stand-ins for what a CPU cannot show: device memory, ranks, other releases.

What a request is to vLLM's front end is real: its states, its samples and their parent.
"""

import copy
import gc
import os
import warnings
import weakref
from pathlib import Path
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


def request(engine_id, params, external="r"):
    """A request as vLLM's front end makes it."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    samples = isinstance(params, SamplingParams)
    return EngineCoreRequest(
        request_id=engine_id,
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=params if samples else None,
        pooling_params=None if samples else params,
        arrival_time=1.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=external,
    )


class FakeEngine:
    """The private surface of an in-process `LLMEngine`, over these ranks; its front end is vLLM's own."""

    def __init__(self, *ranks, **config):
        from vllm.v1.engine.output_processor import OutputProcessor

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
        self.output_processor = OutputProcessor(None, log_stats=False)
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

    def add_request(self, request_id, prompt, params, arrival_time=None, **options):
        from vllm.v1.engine import EngineCoreRequest

        self.log.append(("add_request", request_id, prompt, params, arrival_time, options))
        given = prompt if isinstance(prompt, EngineCoreRequest) else request(request_id, params)
        given.external_req_id, given.request_id = given.request_id, f"{given.request_id}-internal"
        self.enter(given)
        return given.request_id if self.answers_add else None

    answers_add = True  # with the internal id; older releases answered nothing
    breaks_at = broken = None  # at which sample an add fails, and how

    def enter(self, given):
        """What `LLMEngine.add_request` does with a request that is made: each sample has its own state."""
        from vllm.v1.engine.parallel_sampling import ParentRequest

        samples = getattr(given.params, "n", 1)
        parent = ParentRequest(given) if samples > 1 else None
        for index in range(samples):
            if index == self.breaks_at:
                raise self.broken
            child = copy.copy(given)
            if parent is not None:
                child.request_id, child.sampling_params = parent.get_child_info(index)
            self.output_processor.add_request(child, "p", parent, index)

    def abort_request(self, request_ids, internal=False):
        self.log.append(("abort_request", self.output_processor.abort_requests(request_ids, internal)))

    def left(self):
        """Whatever the front end still knows of any request."""
        front = self.output_processor
        return [*front.request_states, *front.parent_requests, *front.external_req_ids]

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


@pytest.mark.parametrize(("instance", "device"), [(None, True), ("one", True), ("one", False)])
def test_allocations_are_those_of_the_pool_if_there_is_one(adapter, monkeypatch, instance, device):
    """Asking for the pool must not make one; without a device that it could map nothing is asked."""
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
    monkeypatch.setattr(adapter, "current_platform", SimpleNamespace(is_cuda_alike=lambda: device))
    assert list(adapter._allocations()) == (data if instance and device else [])


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


def test_a_pool_that_does_not_say_what_sleeps_is_taken_to_be_mapped(gpu):
    """Before an allocation knew whether it is asleep, all of the pool counts as what could sleep."""
    engine, _ = gpu(Rank(30, 100, [SimpleNamespace(tag="weights", handle=(0, 20))]))
    assert engine.memory().asleepable == 20


def test_host_memory_is_what_this_process_has_resident(adapter, monkeypatch):
    """In bytes, as the kernel says; nothing where it doesn't say."""
    engine = adapter.VllmInprocess(FakeEngine())
    _, _, resident = Path("/proc/self/status").read_text("ascii").partition("VmRSS:")
    assert engine.memory().host == pytest.approx(int(resident.split()[0]) * 1024, rel=0.1)

    def nothing(*_):
        raise FileNotFoundError("/proc")

    monkeypatch.setattr(adapter.Path, "read_text", nothing)
    assert engine.memory().host is None


def test_a_wake_without_device_memory_needs_none(adapter):
    """On a CPU there is nothing to be short of."""
    fake = FakeEngine(Rank(allocations=[allocation("weights", 20, asleep=True)]))
    adapter.VllmInprocess(fake).wake_up(("weights", "kv_cache"))
    assert fake.log == [("wake_up", ["weights", "kv_cache"]), "PAUSED_ALL"]


def test_a_tag_with_nothing_asleep_needs_no_memory(gpu):
    """Where the pool holds nothing of a tag its wake is free, even on a full device."""
    engine, fake = gpu(Rank(0, 100, [allocation("weights", 20)]))
    engine.wake_up(["kv_cache"])
    assert ("wake_up", ["kv_cache"]) in fake.log


def test_the_kv_cache_alone_is_released_by_the_engine(adapter):
    """Where a release has a call for it, it is that call."""
    fake = FakeEngine()
    fake.release_kv_cache_memory = lambda: fake.log.append("released")
    adapter.VllmInprocess(fake).release_kv_cache_memory()
    assert fake.log == ["released"]


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


@pytest.fixture
def built(adapter, monkeypatch):
    """What engines were built with, in this list, instead of building one."""
    calls = []

    def build(**kwargs):
        calls.append(kwargs)
        return FakeEngine()

    monkeypatch.setattr(adapter, "LLMEngine", build)
    monkeypatch.setattr(adapter.EngineArgs, "create_engine_config", lambda args: f"config of {args.model}")
    monkeypatch.setattr(adapter.Executor, "get_class", staticmethod(lambda config: f"executor for {config}"))
    return calls


@pytest.mark.parametrize("quiet", [True, False])
def test_an_engine_is_built_in_this_process_from_arguments(adapter, built, quiet, tmp_path):
    """From keywords or an `EngineArgs` alike: with its statistics as asked for, never in another process."""
    arguments = {"model": str(tmp_path), "disable_log_stats": quiet}
    adapter.VllmInprocess(**arguments)
    adapter.VllmInprocess(adapter.EngineArgs(**arguments))
    expected = {
        "vllm_config": f"config of {tmp_path}",
        "executor_class": f"executor for config of {tmp_path}",
        "log_stats": not quiet,
        "multiprocess_mode": False,
    }
    assert built == [expected, expected]


def test_an_engine_that_is_there_is_taken(adapter, built):
    """An `LLMEngine`, or what holds one, as an `LLM` does; nothing is built."""
    fake = FakeEngine()
    assert adapter.VllmInprocess(fake).raw is fake
    assert adapter.VllmInprocess(SimpleNamespace(llm_engine=fake)).raw is fake
    assert built == []


@pytest.mark.parametrize("by_tags", [True, False])
def test_partly_awake_is_as_good_as_the_release_makes_it(adapter, by_tags):
    """Where an executor sleeps by tags it can go back to sleep, and wake the KV cache first, at no cost."""

    class Executor:
        sleeping_tags = frozenset()
        is_sleeping = property(lambda self: bool(self.sleeping_tags)) if by_tags else False

    fake = FakeEngine()
    fake.engine_core.engine_core.model_executor = Executor()
    capabilities = adapter.VllmInprocess(fake).capabilities
    assert (capabilities.resleep_partial, capabilities.kv_first) == (by_tags, by_tags)
    assert any("back to sleep" in cost for cost in capabilities.costs) is not by_tags


def test_after_a_shutdown_nothing_of_the_engine_is_kept(adapter):
    """The engine core is ended once, however often it is asked; engine and requests can be freed."""
    from vllm import SamplingParams

    fake = FakeEngine()
    fake.enter(request("r-1", SamplingParams()))
    ended = []
    fake.engine_core.shutdown = lambda: ended.append("shutdown")
    engine = adapter.VllmInprocess(fake)
    held = [weakref.ref(thing) for thing in (fake, fake.output_processor.request_states["r-1"])]
    engine.shutdown()
    engine.shutdown()
    assert ended == ["shutdown"]
    del fake
    gc.collect()
    assert [ref() for ref in held] == [None, None]


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


def test_a_parameter_that_a_broken_reload_left_without_memory_is_missing(adapter):
    """A reload makes parameters anew, on the meta device first: one that it never came to is a hole."""
    import torch

    holed = torch.tensor([1.0, float("nan")])
    fake = FakeEngine(Rank(parameters={"a": torch.ones(2), "b": holed, "c": torch.empty(2, device="meta")}))
    engine = adapter.VllmInprocess(fake)
    assert sorted(engine.missing_weights()) == ["b", "c"]
    fake.ranks[0].parameters = {"c": torch.empty(2, device="meta")}
    assert engine.missing_weights() == ("c",)
    fake.ranks[0].parameters = {}
    assert engine.missing_weights() == ()


@pytest.fixture
def deterministic():
    """How to set and read the switches of torch for determinism, which are put back afterwards."""
    import torch
    import torch.utils.deterministic

    def switches():
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )

    def switch(enabled, warn_only, fills):
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills

    before = switches()
    yield switch, switches
    switch(*before)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "before", [(False, False, False), (False, False, True), (True, False, True), (True, True, False)]
)
def test_a_reload_starts_from_nan_and_leaves_torch_as_it_was(adapter, deterministic, before, fails):
    """What it allocates and doesn't fill is NaN, and no operation is refused; torch's switches are put back.

    Whatever the caller had them at, and though the reload fails.
    """
    import torch

    class Worker:
        def reload_weights(self, *args, **kwargs):
            assert torch.empty(100).isnan().all()
            torch.ones(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))  # which is not deterministic
            if fails:
                raise RuntimeError("broke")
            return args, kwargs

    switch, switches = deterministic
    switch(*before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if fails:
            with pytest.raises(RuntimeError, match="broke"):
                adapter._reload_over_nan(Worker(), 1)
        else:
            assert adapter._reload_over_nan(Worker(), 1, path="p") == ((1,), {"path": "p"})
    assert switches() == before


@pytest.mark.parametrize("checks", [True, False])
def test_only_a_reload_of_weights_that_are_checked_starts_from_nan(adapter, checks):
    """It is the engine's own call with the same arguments; so is every other call, as it was made."""
    import torch

    fake = FakeEngine(Rank(parameters={"a": torch.ones(2, dtype=torch.float32 if checks else torch.int8)}))
    calls = []

    def record(*args, **kwargs):
        calls.append((args, kwargs))
        return ["done"]

    fake.collective_rpc = fake.add_lora = record
    engine = adapter.VllmInprocess(fake)
    assert engine.call("collective_rpc", "reload_weights", 5.0, kwargs={"weights_path": "p"}) == ["done"]
    reload = adapter._reload_over_nan if checks else "reload_weights"
    assert calls.pop() == ((reload, 5.0), {"kwargs": {"weights_path": "p"}})
    for name, args in (("collective_rpc", ("profile", 1)), ("add_lora", ("reload_weights", 2))):
        assert engine.call(name, *args) == ["done"]
        assert calls.pop() == (args, {})


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


def test_the_level_of_a_sleep_is_known_until_scheduling_resumes(adapter):
    """What the next one was that others made is not known from ours."""
    fake = FakeEngine()
    engine = adapter.VllmInprocess(fake)
    fake.sleep = lambda level, mode: None
    engine.sleep(2)
    fake.executor.sleeping_tags = {"weights"}
    assert engine.condition().level == 2
    fake.executor.sleeping_tags = set()
    engine.resume_scheduling()
    fake.executor.sleeping_tags = {"weights"}
    assert engine.condition().level is None


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


def test_a_snapshot_of_parameters_shares_nothing_that_changes(adapter):
    """Containers are copied, empty ones shared only where the engine clones them before it changes them."""
    import msgspec
    from vllm import SamplingParams

    params = SamplingParams(stop=["x"], logit_bias={1: 2.0}, max_tokens=3)
    mine = adapter._snapshot(params)
    assert mine == params
    assert mine is not params
    params.stop.append("y")
    params.logit_bias[2] = 1.0
    assert (mine.stop, mine.logit_bias, mine.max_tokens) == (["x"], {1: 2.0}, 3)
    assert adapter._snapshot(SamplingParams()).bad_words is adapter._snapshot(SamplingParams()).bad_words
    kept = SamplingParams(stop=["x"])
    kept.skip_clone = True
    mine = adapter._snapshot(kept)
    assert mine == kept
    for name in mine.__struct_fields__:
        if isinstance(getattr(mine, name), (list, dict, set)):
            assert all(getattr(mine, name) is not empty for empty in adapter._EMPTY.values()), name
    plain = SimpleNamespace(stop=["x"])
    assert adapter._snapshot(plain).stop is not plain.stop
    unclear = msgspec.defstruct("Params", [("stop", list)])  # it doesn't say whether it will be cloned
    assert adapter._snapshot(unclear([])).stop is not adapter._snapshot(unclear([])).stop


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
    assert adapter.as_value_error(broken) is broken
    for kind in adapter.BAD_ARGUMENT:
        error = adapter.as_value_error(kind("bad"))
        assert type(error) is ValueError
        assert "bad" in str(error)


def test_equal_parameters_in_a_row_share_one_snapshot(adapter):
    """A batch of thousands has its parameters once; others, or changed ones, have their own."""
    from vllm import SamplingParams

    engine = adapter.VllmInprocess(FakeEngine())
    params = SamplingParams(stop=["x"])

    def prepare():
        return engine.prepare("r", "p", params, {}).params

    first = prepare()
    assert first == params
    assert first is not params
    assert prepare() is first
    params.stop.append("y")
    assert (prepare().stop, first.stop) == (["x", "y"], ["x"])


def test_a_request_that_is_made_already_speaks_for_itself(adapter):
    """Its own id and parameters count, it is not validated again, and vLLM writes into a copy of it."""
    from vllm import SamplingParams

    fake = FakeEngine()
    engine = adapter.VllmInprocess(fake)
    made = request("made", SamplingParams(max_tokens=7), external=None)
    call = engine.prepare("other", made, None, {})
    assert (call.request_id, call.params) == ("made", made.params)
    engine.validate(call)
    assert fake.log == []
    assert engine.add(call) == "made-internal"
    assert (made.request_id, made.external_req_id) == ("made", None)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("answers", [True, False])
def test_a_request_is_added_as_it_was_made(adapter, answers, samples):
    """The engine gets the very prompt, the arrival of the call and its options; its id comes back.

    Also from a release that doesn't say the id, and for several samples it is that of all of them.
    """
    from vllm import SamplingParams

    fake = FakeEngine()
    fake.answers_add = answers
    fake.enter(request("older-1", SamplingParams(n=2)))
    fake.enter(request("older-2", SamplingParams()))
    engine = adapter.VllmInprocess(fake)
    prompt = {"prompt_token_ids": [1, 2]}
    call = engine.prepare("r", prompt, SamplingParams(n=samples), {"arrival_time": 5.0, "priority": 3})
    assert engine.add(call) == "r-internal"
    [(_, request_id, given, params, arrival, options)] = fake.log
    assert (request_id, arrival, options) == ("r", 5.0, {"priority": 3})
    assert given is prompt
    assert params is call.params


@pytest.mark.parametrize(("samples", "breaks_at"), [(1, 0), (3, 0), (3, 2)])
def test_what_a_failed_add_leaves_is_removed(adapter, samples, breaks_at):
    """Samples that were in already, and their parent, go again, and nothing else; the error is the engine's.

    vLLM's own abort by the caller's id would leave the parent.
    """
    from vllm import SamplingParams

    fake = FakeEngine()
    fake.enter(request("other-1", SamplingParams(), external="other"))
    others = fake.left()
    engine = adapter.VllmInprocess(fake)
    call = engine.prepare("r", "p", SamplingParams(n=samples), {})
    fake.breaks_at = breaks_at
    for fake.broken, seen in ((adapter.BAD_ARGUMENT[1]("bad"), ValueError), (KeyError("bad"), KeyError)):
        fake.log.clear()
        with pytest.raises(seen, match="bad"):
            engine.add(call)
        assert fake.left() == others
        aborts = [entry[1] for entry in fake.log if entry[0] == "abort_request"]
        assert aborts == ([["0_r-internal", "1_r-internal"]] if breaks_at else [])


KINDS = ("CUMULATIVE", "DELTA", "FINAL_ONLY")


@pytest.fixture
def at_work(adapter):
    """An engine with requests of one, of two samples and of none (pooling), each sample two tokens on."""
    from vllm import PoolingParams, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    def make(kind="CUMULATIVE"):
        fake = FakeEngine()
        kind = RequestOutputKind[kind]
        fake.enter(request("one-1", SamplingParams(output_kind=kind), external="one"))
        fake.enter(request("two-1", SamplingParams(n=2, output_kind=kind), external="two"))
        fake.enter(request("pool-1", PoolingParams(), external="pool"))
        for place, state in enumerate(fake.output_processor.request_states.values()):
            if state.detokenizer is not None:
                state.detokenizer.token_ids += [place, place + 10]
        return adapter.VllmInprocess(fake), fake

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_requests_in_flight_are_found_once_with_all_their_samples(at_work, kind):
    """By the caller's id and the engine's; whether outputs are deltas is known, too."""
    engine, _ = at_work(kind)
    found = [
        (each.request_id, each.engine_id, each.samples, each.delta) for each in engine.condition().requests
    ]
    delta = kind == "DELTA"
    assert found == [("one", "one-1", 1, delta), ("two", "two-1", 2, delta), ("pool", "pool-1", 1, False)]


@pytest.mark.parametrize("asked", [False, True])
def test_an_abort_leaves_nothing_of_a_request_and_all_of_the_others(at_work, asked):
    """Every sample and the parent go, whether or not their last outputs were asked for before."""
    engine, fake = at_work()
    if asked:
        engine.last_outputs(["one-1", "two-1"], "abort")
    engine.abort(["two-1"])
    assert fake.left() == ["one-1", "pool-1", "one", "pool"]
    engine.abort(["one-1", "pool-1"])
    assert fake.left() == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reason", ["abort", "error"])
def test_last_outputs_hold_the_tokens_so_far_and_why_there_are_no_more(at_work, kind, reason):
    """One of each request and sample, or with only final outputs one of all samples; in vLLM's own form."""
    engine, _ = at_work(kind)
    outputs = engine.last_outputs(["one-1", "two-1", "unknown"], reason)
    assert [output.request_id for output in outputs] == [
        "one",
        "two",
        *(["two"] if kind != "FINAL_ONLY" else []),
    ]
    assert outputs[-1].finished
    samples = [sample for output in outputs for sample in output.outputs]
    tokens = [[], [], []] if kind == "DELTA" else [[0, 10], [1, 11], [2, 12]]
    assert [sample.token_ids for sample in samples] == tokens
    assert {sample.finish_reason for sample in samples} == {reason}


def test_the_last_output_of_a_sample_comes_though_another_is_done(at_work):
    """A sample that finished before has had its last output; the others have theirs."""
    engine, fake = at_work()
    del fake.output_processor.request_states["0_two-1"]
    assert [output.outputs[0].index for output in engine.last_outputs(["two-1"], "abort")] == [1]


def test_the_last_output_of_a_pooling_request_is_empty(at_work):
    """There is no part of a pooled vector: it is done, and holds nothing."""
    engine, _ = at_work()
    [output] = engine.last_outputs(["pool-1"], "abort")
    assert output.finished
    assert output.outputs.data.numel() == 0


def test_only_a_request_of_which_no_sample_ever_ran_is_unstarted(at_work):
    """One sample that computes, or is gone already, and the request can't be taken back."""
    engine, fake = at_work()

    def waiting(status="WAITING"):
        return SimpleNamespace(
            status=SimpleNamespace(name=status),
            num_computed_tokens=0,
            num_output_tokens=0,
            num_preemptions=0,
        )

    requests = fake.scheduler.requests
    requests.update({"one-1": waiting(), "0_two-1": waiting(), "1_two-1": waiting()})
    assert engine.unstarted(["two-1", "one-1", "pool-1"]) == ["two-1", "one-1"]
    requests["1_two-1"] = waiting("RUNNING")
    assert engine.unstarted(["two-1", "one-1"]) == ["one-1"]
    del requests["1_two-1"]
    assert engine.unstarted(["two-1", "one-1"]) == ["one-1"]


def test_tokens_are_counted_over_all_samples(at_work):
    """Of a request in flight, and of an output; what is pooled has no tokens, nor has what is gone."""
    engine, _ = at_work("FINAL_ONLY")
    assert [engine.tokens(name) for name in ("one-1", "two-1", "pool-1", "gone")] == [2, 4, 0, 0]
    outputs = engine.last_outputs(["one-1", "two-1", "pool-1"], "abort")
    assert [engine.count_tokens(output) for output in outputs] == [2, 4, 0]


def test_a_copied_output_stays_as_it_was(adapter):
    """The lists of a cumulative output are live, vLLM goes on writing into them: a copy has its own."""
    from vllm import CompletionOutput, PoolingRequestOutput, RequestOutput

    engine = adapter.VllmInprocess(FakeEngine())
    samples = [CompletionOutput(0, "a", [1], 0.0, [{1: None}]), CompletionOutput(1, "b", [2], None, None)]
    output = RequestOutput("r", "p", [9], None, samples, finished=False)
    kept = engine.copy_output(output)
    for sample in samples:
        sample.text += "x"
        sample.token_ids.append(3)
    samples[0].logprobs.append({3: None})
    del samples[1]
    assert [(each.text, each.token_ids, each.logprobs) for each in kept.outputs] == [
        ("a", [1], [{1: None}]),
        ("b", [2], None),
    ]
    assert output.outputs is samples
    pooled = PoolingRequestOutput(
        "r", outputs=object(), prompt_token_ids=[9], num_cached_tokens=0, finished=True
    )
    assert engine.copy_output(pooled) is pooled


@pytest.mark.parametrize("delta", [True, False])
def test_two_outputs_of_a_slow_consumer_become_one(adapter, delta):
    """Deltas are joined, sample by sample, with their log probabilities; else the later one stands."""
    from vllm import CompletionOutput, PoolingRequestOutput, RequestOutput

    engine = adapter.VllmInprocess(FakeEngine())

    def output(samples, *, finished):
        made = [
            CompletionOutput(index, text, [token], 0.0, [{token: None}]) for index, text, token in samples
        ]
        return RequestOutput("r", "p", [9], None, made, finished=finished)

    merged = engine.merge_outputs(
        output([(0, "a", 1), (1, "b", 2)], finished=False),
        output([(0, "c", 3), (2, "d", 4)], finished=True),
        delta=delta,
    )
    assert merged.finished
    assert {
        sample.index: (sample.text, sample.token_ids, len(sample.logprobs)) for sample in merged.outputs
    } == {
        0: ("ac", [1, 3], 2) if delta else ("c", [3], 1),
        1: ("b", [2], 1),
        2: ("d", [4], 1),
    }
    pooled = [
        PoolingRequestOutput("r", outputs=n, prompt_token_ids=[9], num_cached_tokens=0, finished=True)
        for n in range(2)
    ]
    assert engine.merge_outputs(*pooled, delta=delta) is pooled[1]


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


def test_the_doctor_looks_at_each_part(adapter, monkeypatch):
    """Every call that the machine rests on is looked for: a release without any has a row for each."""
    monkeypatch.setattr(adapter, "LLMEngine", type("LLMEngine", (), {}))
    monkeypatch.setattr("vllm.v1.core.sched.scheduler.Scheduler", type("Scheduler", (), {}))
    missing = {name for name, answer in adapter.doctor() if answer.startswith("missing: ")}
    assert {"LLMEngine.sleep", "LLMEngine.wake_up"} <= missing
    assert {f"Scheduler.{name}" for name in ("set_pause_state", "pause_state", "has_requests")} <= missing


@pytest.mark.parametrize(("name", "said"), [("H200", "H200"), ("", "unknown"), (None, "unknown")])
def test_the_doctor_names_the_platform(adapter, monkeypatch, name, said):
    """As vLLM does; where it has no name for it the platform is unknown."""
    monkeypatch.setattr(adapter, "current_platform", SimpleNamespace(device_name=name))
    assert dict(adapter.doctor())["platform"] == said
