"""The audit log of a real vLLM: what its requests came to, and nothing that can't have been."""

import pytest

from engine_adapter import attach
from lifecycle.audit import AuditLog
from tests.audit_runs import read_back
from tests.conftest import undo
from tests.test_vllm_facts import PROMPTS, sampling

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("kind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"])
def test_requests_have_their_tokens_and_texts(llm, tmp_path, kind):
    """Every request ends once, with the tokens and the texts that its caller got, over a sleep."""
    from vllm.sampling_params import RequestOutputKind

    lifecycle = attach(llm, sinks=[AuditLog(tmp_path / "log", texts=True)])
    wanted = {}
    for number, prompt in enumerate(PROMPTS):
        params = sampling(number)
        params.output_kind = RequestOutputKind[kind]
        params.n = 1 + number % 2
        lifecycle.add_request(str(number), prompt, params)
        wanted[str(number)] = {}
    outputs = lifecycle.step()
    lifecycle.sleep(1)
    lifecycle.wake_up()
    while outputs or lifecycle.has_unfinished_requests():
        for output in outputs:
            texts = wanted[output.request_id]
            for sample in output.outputs:
                before = texts.get(sample.index, ("", 0)) if kind == "DELTA" else ("", 0)
                texts[sample.index] = before[0] + sample.text, before[1] + len(sample.token_ids)
        outputs = lifecycle.step() if lifecycle.has_unfinished_requests() else []
    undo(llm, lifecycle)
    records, problems, [session] = read_back(tmp_path / "log")
    assert problems == []
    assert session.clean
    ends = {record["request"]: record for record in records if record["event"] == "request_finished"}
    assert ends.keys() == wanted.keys()
    for name, end in ends.items():
        samples = [wanted[name][index] for index in sorted(wanted[name])]
        assert end["texts"] == [text for text, _ in samples]
        assert end["tokens"] == sum(tokens for _, tokens in samples)
        assert end["outcome"] == "length"
