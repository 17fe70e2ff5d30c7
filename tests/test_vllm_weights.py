"""Weights on a real vLLM: served when they are the right ones, refused when they are not.

The worker's sleep really loses them (`tests.nan_worker`), loads go through vLLM's own loaders, and
every verdict is checked against tokens of an engine that nobody touched.
"""

from functools import partial

import pytest

from lifecycle import EngineFailed, IllegalCall, State, WeightsNotValid
from tests.conftest import undo
from tests.engines import core, model_dir, worker

pytestmark = pytest.mark.vllm

PROMPTS = ("the cat sat", "on the mat", "and the dog did not")
PREFIX = "a block of the prefix cache is 128 tokens long; " * 3  # a token is a byte


def params(index=0, **options):
    from vllm import SamplingParams

    return SamplingParams(temperature=1.0, seed=100 + 10 * index, max_tokens=24, ignore_eos=True, **options)


def tokens_of(llm, prompts=PROMPTS):
    """What `LLM.generate` makes of these prompts."""
    asked = [params(index) for index in range(len(prompts))]
    outputs = llm.generate(list(prompts), asked, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def checkpoint():
    from safetensors.torch import load_file

    return load_file(model_dir() / "model.safetensors")


def new_checkpoint():
    """Another model of the same shape."""
    import torch

    dice = torch.Generator().manual_seed(1)
    return {name: data + 0.1 * torch.randn(data.shape, generator=dice) for name, data in checkpoint().items()}


def load_unseen(llm, tensors):
    """Parameter by parameter on the model object, as TRL does: no guard sees it."""
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    for item in tensors.items():
        model.load_weights([item])


def reload_by_rpc(llm, **kwargs):
    return llm.collective_rpc("reload_weights", kwargs=kwargs)


def breaks_half_way(tensors):
    for index, item in enumerate(tensors.items()):
        if index == len(tensors) // 2:
            msg = "the trainer went away"
            raise ConnectionError(msg)
        yield item


class Expected:
    """Tokens of plain engines: with the checkpoint, and with the other one."""

    def __init__(self, llm):
        self.old = tokens_of(llm)
        self.old_after_prefix = tokens_of(llm, [PREFIX])
        load_unseen(llm, new_checkpoint())
        # The same prefix is still cached: this is what plain vLLM makes of it.
        self.mixed_after_prefix = tokens_of(llm, [PREFIX])
        llm.llm_engine.reset_prefix_cache()
        self.new = tokens_of(llm)
        self.new_after_prefix = tokens_of(llm, [PREFIX])
        load_unseen(llm, checkpoint())
        llm.llm_engine.reset_prefix_cache()


@pytest.fixture(scope="module")
def expected(house):
    return Expected(house.llm())


@pytest.fixture
def llm(house):
    """A plain engine with the checkpoint's weights; they are put back after the test."""
    llm = house.llm()
    yield llm
    load_unseen(llm, checkpoint())
    assert llm.llm_engine.reset_prefix_cache()


@pytest.fixture
def guard(llm):
    """Attach with options of the test's own; checked and undone like `guarded`."""
    from engine_adapter import attach

    attached = []

    def attach_with(**options):
        attached.append(attach(llm, sinks=(), **options))
        return attached[-1]

    yield attach_with
    for lifecycle in attached:
        assert lifecycle.check() == []
        undo(llm, lifecycle)


def asleep_at_2_then_weights(lifecycle):
    """Weights mapped and empty, KV cache still asleep: where a trainer loads."""
    lifecycle.sleep(2)
    assert not lifecycle.wake_up(["weights"])


def assert_refused(llm, lifecycle, *missing):
    """All is awake, nothing is served, and the error names what is missing."""
    assert lifecycle.state is State.PARTIALLY_AWAKE
    for call in (lambda: tokens_of(llm), llm.llm_engine.step):
        with pytest.raises(WeightsNotValid) as caught:
            call()
        assert caught.value.missing == missing
        assert all(name in str(caught.value) for name in missing[:5])


# -- what plain vLLM does --------------------------------------------------------------------------


def test_plain_vllm_mixes_models_in_its_prefix_cache(expected):
    """After a load with a cached prefix plain vLLM's tokens are neither model's: the fact to be guarded."""
    assert expected.mixed_after_prefix != expected.old_after_prefix
    assert expected.mixed_after_prefix != expected.new_after_prefix


def test_the_models_can_be_told_apart(expected):
    """The two models, and the prompts, give tokens that differ, so that an equality says something."""
    outputs = [*expected.old, *expected.new, *expected.old_after_prefix, *expected.new_after_prefix]
    assert len(set(outputs)) == 8
    assert min(len(set(ids)) for ids in outputs) >= 15


# -- checked: holes --------------------------------------------------------------------------------

# What a trainer forgot, and vLLM's name of the parameter that has the hole.
FORGOTTEN = {
    "model.layers.0.self_attn.k_proj.weight": "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.1.self_attn.k_proj.weight": "model.layers.1.self_attn.qkv_proj.weight",
    "model.layers.1.mlp.up_proj.weight": "model.layers.1.mlp.gate_up_proj.weight",
    "model.layers.0.input_layernorm.weight": "model.layers.0.input_layernorm.weight",
    "model.norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    "model.embed_tokens.weight": "model.embed_tokens.weight",
}


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_a_single_forgotten_parameter_is_named(llm, guarded, expected, forgotten):
    """Level 2 and a load without one parameter: it is named, nothing is served; loaded, all is right."""
    tensors = checkpoint()
    asleep_at_2_then_weights(guarded)
    load_unseen(llm, {name: data for name, data in tensors.items() if name != forgotten})
    report = guarded.wake_up(["kv_cache"])
    assert not report
    assert report.missing == (FORGOTTEN[forgotten],)
    assert_refused(llm, guarded, FORGOTTEN[forgotten])
    with pytest.raises(WeightsNotValid):
        guarded.mark_weights_loaded()
    load_unseen(llm, {forgotten: tensors[forgotten]})
    assert tokens_of(llm) == expected.old
    assert guarded.state is State.AWAKE


def test_the_check_trusts_nothing_that_the_sleep_left(llm, guarded, expected, monkeypatch):
    """Freshly mapped weights may hold any plausible numbers: holes are found all the same."""
    inner = worker(llm)
    real = inner.wake_up

    def wake_up(tags=None):
        real(tags)
        for _, parameter in inner.get_model().named_parameters():
            parameter.data.fill_(0.5)

    monkeypatch.setattr(inner, "wake_up", wake_up)
    guarded.sleep(2)
    guarded.wake_up(["weights"])
    hole = "model.layers.1.self_attn.k_proj.weight"
    load_unseen(llm, {name: data for name, data in checkpoint().items() if name != hole})
    monkeypatch.undo()
    assert guarded.wake_up(["kv_cache"]).missing == (FORGOTTEN[hole],)
    guarded.reload_weights()
    assert tokens_of(llm) == expected.old


def test_several_forgotten_parameters_are_all_named(llm, guarded, expected):
    """Every hole is in the report, each fused parameter once."""
    asleep_at_2_then_weights(guarded)
    load_unseen(llm, {name: data for name, data in checkpoint().items() if "layers.0." not in name})
    report = guarded.wake_up()
    assert len(report.missing) == len(set(report.missing)) == 6
    assert all(name.startswith("model.layers.0.") for name in report.missing)
    guarded.reload_weights()
    assert tokens_of(llm) == expected.old


def test_a_partial_reload_with_holes_is_not_served(llm, guarded, expected):
    """`reload_weights` with an iterator that lacks something, which vLLM takes in silence, is not enough."""
    asleep_at_2_then_weights(guarded)
    guarded.wake_up(["kv_cache"])
    parts = {name: data for name, data in checkpoint().items() if "k_proj" not in name}
    report = guarded.reload_weights(weights_iterator=iter(parts.items()))
    assert not report
    assert_refused(
        llm, guarded, "model.layers.0.self_attn.qkv_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"
    )
    assert guarded.reload_weights(weights_iterator=iter(checkpoint().items()))
    assert tokens_of(llm) == expected.old


def test_level_2_without_a_load_is_not_served(llm, guarded, expected):
    """Waking everything after level 2 serves nothing until there are weights."""
    guarded.sleep(2)
    report = guarded.wake_up()
    assert not report
    assert len(report.missing) == 15
    assert_refused(llm, guarded, *report.missing)
    handle = llm.llm_engine.add_request("late", PROMPTS[0], params(0))
    assert handle
    assert guarded.snapshot().held == 1
    assert guarded.reload_weights()
    assert guarded.state is State.RUNNING
    while not (outputs := [output for output in guarded.step() if output.finished]):
        pass
    assert tuple(outputs[0].outputs[0].token_ids) == expected.old[0]


# -- checked: loads --------------------------------------------------------------------------------


def test_a_load_that_nobody_sees_is_recognised(llm, guarded, expected):
    """TRL's order: weights awake, one unseen load a parameter, a cache reset with the KV cache asleep."""
    llm.sleep(level=2, mode="abort")
    assert not llm.wake_up(["weights"])
    load_unseen(llm, new_checkpoint())
    assert isinstance(llm.llm_engine.reset_prefix_cache(False, False), bool)
    assert guarded.state is State.PARTIALLY_AWAKE
    assert llm.wake_up(["kv_cache"])
    assert guarded.state is State.AWAKE
    assert tokens_of(llm) == expected.new


@pytest.mark.parametrize("through", ["rpc", "apply_model", "after the wake"])
def test_loads_on_other_ways_are_recognised(llm, guarded, expected, through):
    """A worker method of the caller's own, a function on the model, or a load once all is awake."""
    tensors = checkpoint()

    def refit(worker):
        worker.get_model().load_weights(tensors.items())

    asleep_at_2_then_weights(guarded)
    if through == "rpc":
        llm.collective_rpc(refit)
    elif through == "apply_model":
        llm.apply_model(lambda model: model.load_weights(tensors.items()) and None)
    else:
        assert not guarded.wake_up()
        load_unseen(llm, tensors)
    assert bool(guarded.wake_up()) is True
    assert tokens_of(llm) == expected.old


@pytest.mark.parametrize("when", ["before kv_cache", "after kv_cache"])
def test_a_load_that_is_seen_makes_them_valid(llm, guarded, expected, when):
    """`reload_weights` through the lifecycle or the worker call, before or after the KV cache is back."""
    asleep_at_2_then_weights(guarded)
    if when == "after kv_cache":
        assert not guarded.wake_up()
        llm.collective_rpc("reload_weights")
    else:
        assert guarded.reload_weights(version="step 7")
        assert guarded.snapshot().weights_version == "step 7"
        guarded.wake_up()
    assert guarded.state is State.AWAKE
    assert tokens_of(llm) == expected.old


def test_generation_goes_on_while_loads_alternate(llm, guarded, expected):
    """A trainer's loop: level 2, another model, generate; each time the tokens are that model's."""
    for tensors, right in [(new_checkpoint(), expected.new), (checkpoint(), expected.old)] * 2:
        asleep_at_2_then_weights(guarded)
        load_unseen(llm, tensors)
        assert guarded.wake_up(["kv_cache"])
        assert tokens_of(llm) == right
        assert tokens_of(llm) == right


# -- the other policies ----------------------------------------------------------------------------


def test_declared_weights_wait_for_the_declaration(llm, guard, expected):
    """Under "declared" an unseen load is not enough: the caller says so, and then it serves."""
    lifecycle = guard(weights="declared")
    asleep_at_2_then_weights(lifecycle)
    load_unseen(llm, checkpoint())
    assert not lifecycle.wake_up()
    assert_refused(llm, lifecycle)
    assert lifecycle.mark_weights_loaded(version="mine").version == "mine"
    assert lifecycle.state is State.AWAKE
    assert tokens_of(llm) == expected.old


def test_declared_weights_can_be_declared_before_the_kv_cache_wakes(llm, guard, expected):
    """The declaration may come as soon as the weights are resident."""
    lifecycle = guard(weights="declared")
    lifecycle.sleep(2)
    with pytest.raises(IllegalCall):
        lifecycle.mark_weights_loaded()
    lifecycle.wake_up(["weights"])
    load_unseen(llm, new_checkpoint())
    lifecycle.mark_weights_loaded()
    assert lifecycle.wake_up()
    assert tokens_of(llm) == expected.new


def test_unchecked_weights_are_served_and_audited_as_such(llm, guard, expected):
    """Under "unchecked" the wake makes them valid, and the audit says that nobody looked."""
    lifecycle = guard(weights="unchecked")
    asleep_at_2_then_weights(lifecycle)
    load_unseen(llm, checkpoint())
    assert lifecycle.wake_up()
    assert [event["call"] for event in lifecycle.events() if event["event"] == "weights"] == ["unchecked"]
    assert tokens_of(llm) == expected.old


# -- loads that fail or do not end -----------------------------------------------------------------


@pytest.mark.parametrize("through", ["lifecycle", "rpc"])
def test_a_load_that_fails_taints_until_one_succeeds(llm, guarded, expected, through):
    """A load that raises half-way is the caller's to see; nothing is served until a whole one is done."""
    broken = breaks_half_way(new_checkpoint())
    load = guarded.reload_weights if through == "lifecycle" else partial(reload_by_rpc, llm)
    with pytest.raises(ConnectionError):
        load(weights_iterator=broken)
    assert guarded.snapshot().weights == "tainted"
    assert_refused(llm, guarded)
    assert guarded.reload_weights()
    assert guarded.state is State.AWAKE
    assert tokens_of(llm) == expected.old


def test_a_load_that_fails_before_the_kv_cache_wakes_taints(llm, guarded, expected):
    """The same at level 2: the wake of the rest does not make half a model valid."""
    asleep_at_2_then_weights(guarded)
    with pytest.raises(ConnectionError):
        guarded.reload_weights(weights_iterator=breaks_half_way(checkpoint()))
    assert not guarded.wake_up()
    with pytest.raises(WeightsNotValid, match="tainted"):
        tokens_of(llm)
    assert guarded.reload_weights()
    assert tokens_of(llm) == expected.old


class Transfer:
    """A weight transfer engine of vLLM's shape, whose payload is the tensors themselves."""

    supports_draft_weight_update = False

    def __init__(self, model):
        self._model = model

    def start_weight_update(self):
        pass

    def reset_weight_update_target(self):
        pass

    def update_weights(self, info):
        self._model.load_weights(info["tensors"].items())

    def finish_weight_update(self):
        pass


@pytest.fixture
def transfer(llm, monkeypatch):
    """Give the worker a transfer engine, so that its own update calls can be used."""
    inner = worker(llm)
    monkeypatch.setattr(inner, "weight_transfer_engine", Transfer(inner.get_model()))


def test_an_update_is_not_served_until_it_is_finished(llm, guarded, expected, transfer):
    """Between `start_weight_update` and `finish_weight_update` nothing is served, then the new model is."""
    tokens_of(llm, [PREFIX])
    llm.collective_rpc("start_weight_update")
    assert_refused(llm, guarded)
    tensors = list(new_checkpoint().items())
    for chunk in (tensors[:9], tensors[9:]):
        llm.collective_rpc("update_weights", args=({"tensors": dict(chunk)},))
        assert_refused(llm, guarded)
    llm.collective_rpc("finish_weight_update")
    assert guarded.state is State.AWAKE
    assert tokens_of(llm) == expected.new
    assert tokens_of(llm, [PREFIX]) == expected.new_after_prefix


def test_an_update_after_level_2_is_checked_like_any_load(llm, guarded, expected, transfer):
    """Finished updates with a hole are not served; the rest of it cures that."""
    hole = "model.layers.0.self_attn.k_proj.weight"
    tensors = new_checkpoint()
    asleep_at_2_then_weights(guarded)
    llm.collective_rpc("start_weight_update")
    rest = {name: data for name, data in tensors.items() if name != hole}
    llm.collective_rpc("update_weights", args=({"tensors": rest},))
    llm.collective_rpc("finish_weight_update")
    assert not guarded.wake_up()
    assert_refused(llm, guarded, FORGOTTEN[hole])
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", args=({"tensors": {hole: tensors[hole]}},))
    llm.collective_rpc("finish_weight_update")
    guarded.wake_up()
    assert guarded.state is State.AWAKE
    assert tokens_of(llm) == expected.new


# -- caches of the old weights ---------------------------------------------------------------------


@pytest.mark.parametrize("through", ["lifecycle", "rpc"])
@pytest.mark.parametrize("paused", [False, True], ids=["awake", "paused"])
def test_new_weights_never_meet_an_old_prefix(llm, guarded, expected, paused, through):
    """A load with a cached prefix, awake or at a pause: the tokens are exactly the new model's."""
    assert tokens_of(llm, [PREFIX]) == expected.old_after_prefix
    if paused:
        guarded.sleep(0)
    items = iter(new_checkpoint().items())
    if through == "lifecycle":
        guarded.reload_weights(weights_iterator=items)
    else:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": items})
    guarded.wake_up()
    assert tokens_of(llm, [PREFIX]) == expected.new_after_prefix
    assert tokens_of(llm) == expected.new


def test_a_cache_that_would_not_go_is_not_served(llm, guarded, expected, monkeypatch):
    """If vLLM keeps the old prefix after a load the caller hears of it and nothing is served."""
    from lifecycle import CacheNotReset

    tokens_of(llm, [PREFIX])
    with monkeypatch.context() as patch:
        patch.setattr(core(llm), "reset_prefix_cache", lambda *args, **kwargs: False)
        with pytest.raises(CacheNotReset):
            guarded.reload_weights(weights_iterator=iter(new_checkpoint().items()))
    assert_refused(llm, guarded)
    assert guarded.reload_weights()
    assert tokens_of(llm, [PREFIX]) == expected.old_after_prefix


# -- requests in flight ----------------------------------------------------------------------------


def start_three(lifecycle):
    for index, prompt in enumerate(PROMPTS):
        lifecycle.add_request(str(index), prompt, params(index))
    for _ in range(5):
        lifecycle.step()


def finish_three(lifecycle):
    tokens = {}
    while lifecycle.has_unfinished_requests():
        tokens.update({output.request_id: tuple(output.outputs[0].token_ids) for output in lifecycle.step()})
    return [tokens[str(index)] for index in range(3)]


@pytest.mark.parametrize("kept", [False, True], ids=["in flight", "kept"])
def test_no_load_under_requests(llm, guarded, expected, kept):
    """Over requests in flight, or kept, every kind of load is refused; they end with the old tokens."""
    start_three(guarded)
    if kept:
        guarded.sleep(1, "keep")
        guarded.wake_up(["weights"])
    items = list(new_checkpoint().items())
    for load in (
        lambda: guarded.reload_weights(weights_iterator=iter(items)),
        lambda: llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(items)}),
        lambda: llm.collective_rpc("start_weight_update"),
        lambda: llm.collective_rpc("update_weights_from_ipc"),
    ):
        with pytest.raises(IllegalCall):
            load()
    guarded.wake_up()
    assert finish_three(guarded) == expected.old


# -- waking and sleeping again ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["wait", "keep"])
@pytest.mark.parametrize(
    "order",
    [[["weights"], ["kv_cache"]], [["kv_cache"], ["weights"]], [["kv_cache", "weights"]], [None]],
    ids=["weights first", "kv first", "both", "untagged"],
)
def test_tags_may_wake_in_any_order(llm, guarded, expected, order, mode):
    """From level 1 every order of waking ends in the same tokens, kept requests included."""
    start_three(guarded)
    guarded.sleep(1, mode)
    for tags in order[:-1]:
        assert not guarded.wake_up(tags)
        assert guarded.state is State.PARTIALLY_AWAKE
    assert guarded.wake_up(order[-1])
    assert finish_three(guarded) == expected.old


@pytest.mark.parametrize("first", ["weights", "kv_cache"])
def test_level_2_may_wake_in_any_order(llm, guarded, expected, first):
    """From level 2 either tag may come first; the weights are needed all the same."""
    guarded.sleep(2)
    assert not guarded.wake_up([first])
    assert not guarded.wake_up()
    assert_refused(llm, guarded, *guarded.wake_up().missing)
    load_unseen(llm, checkpoint())
    assert guarded.wake_up()
    assert tokens_of(llm) == expected.old


@pytest.mark.parametrize("level", [1, 2])
def test_a_pause_can_be_deepened(llm, guarded, expected, level):
    """From level 0 with kept requests to a real sleep: kept ones survive it, `wait` is refused for them."""
    start_three(guarded)
    guarded.sleep(0, "keep")
    with pytest.raises(IllegalCall, match="kept"):
        guarded.sleep(level, "wait")
    report = guarded.sleep(level, "keep")
    assert report.kept == ("0", "1", "2")
    assert guarded.snapshot().level == level
    assert guarded.snapshot().resident == frozenset()
    guarded.wake_up(["weights"])
    if level == 2:
        load_unseen(llm, checkpoint())
    assert guarded.wake_up()
    assert finish_three(guarded) == expected.old


def test_it_goes_back_to_sleep_from_weights_awake(llm, guarded, expected):
    """With the weights awake and the KV cache asleep it really sleeps again, and wakes right."""
    guarded.sleep(1)
    guarded.wake_up(["weights"])
    guarded.sleep(1)
    assert guarded.state is State.SLEEPING
    assert guarded.snapshot().resident == frozenset()
    assert worker(llm).get_model().lm_head.weight.isnan().all()
    assert guarded.wake_up()
    assert tokens_of(llm) == expected.old


def test_going_back_to_sleep_does_not_make_half_a_load_whole(llm, guarded, expected):
    """A sleep that keeps the weights keeps their holes: they are found after the next wake as well."""
    hole = "lm_head.weight"
    asleep_at_2_then_weights(guarded)
    load_unseen(llm, {name: data for name, data in checkpoint().items() if name != hole})
    guarded.sleep(1)
    assert not guarded.wake_up()
    assert guarded.state is State.PARTIALLY_AWAKE
    guarded.reload_weights()
    assert tokens_of(llm) == expected.old


def test_from_kv_cache_awake_it_does_not_sleep_again(llm, guarded, expected):
    """There vLLM would free nothing and say nothing: refused, with a way out in the message."""
    guarded.sleep(1)
    guarded.wake_up(["kv_cache"])
    with pytest.raises(IllegalCall, match=r"wake_up\(\['weights'\]\)"):
        guarded.sleep(1)
    guarded.wake_up(["weights"])
    assert tokens_of(llm) == expected.old


@pytest.mark.parametrize("which", ["sleep", "wake"])
def test_a_worker_that_fails_is_not_served(llm, house, which):
    """A sleep or wake that raises inside the worker reaches the caller, and the engine is FAILED."""
    from engine_adapter import attach

    guarded = attach(llm, sinks=())
    if which == "wake":
        guarded.sleep(1)
    setattr(worker(llm), f"fail_next_{which}", RuntimeError("injected"))
    with pytest.raises(EngineFailed) as caught:
        guarded.wake_up() if which == "wake" else guarded.sleep(1)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert guarded.state is State.FAILED
    with pytest.raises(EngineFailed):
        tokens_of(llm)
    guarded.detach()
    # The injected failure did nothing, so that the plain engine can be put right by hand.
    llm.llm_engine.wake_up()


# -- an engine of its own --------------------------------------------------------------------------


def test_a_dummy_load_is_not_served_until_it_is_loaded(house, expected):
    """An engine built without weights serves nothing until a whole load, and then the right tokens."""
    from engine_adapter import attach

    llm = house.llm(load_format="dummy")
    guarded = attach(llm, sinks=())
    assert guarded.snapshot().weights == "discarded"
    tensors = checkpoint()
    assert not guarded.wake_up()
    assert len(guarded.wake_up().missing) == 15
    load_unseen(
        llm, {name: data for name, data in tensors.items() if "layers.1.self_attn.k_proj" not in name}
    )
    assert_refused(llm, guarded, "model.layers.1.self_attn.qkv_proj.weight")
    load_unseen(llm, tensors)
    assert tokens_of(llm) == expected.old
    assert guarded.check() == []
    undo(llm, guarded)


def test_a_reload_of_one_shard_over_valid_weights_is_not_served(llm, guarded):
    """vLLM makes the fused tensor anew and leaves the rest of it undefined: refused, by its name."""
    before = tokens_of(llm)
    part = {name: data for name, data in checkpoint().items() if "layers.0.self_attn.k_proj" not in name}
    report = guarded.reload_weights(weights_iterator=iter(part.items()))
    assert not report
    assert report.missing == ("model.layers.0.self_attn.qkv_proj.weight",)
    with pytest.raises(WeightsNotValid, match="qkv_proj"):
        tokens_of(llm)
    assert guarded.reload_weights()
    assert tokens_of(llm) == before


def test_a_reload_that_broke_half_way_is_looked_at_without_harm(llm, guarded):
    """Its tensors have no memory yet: they count as never loaded, and a whole reload makes them good."""
    before = tokens_of(llm)
    guarded.sleep(2)
    guarded.wake_up()
    with pytest.raises(ConnectionError):
        guarded.reload_weights(weights_iterator=breaks_half_way(checkpoint()))
    with pytest.raises(WeightsNotValid, match="never loaded"):
        guarded.mark_weights_loaded()
    assert guarded.reload_weights()
    assert tokens_of(llm) == before
