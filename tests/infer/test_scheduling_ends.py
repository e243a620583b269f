"""Ends of requests: cancellation, time limits, callbacks that raise, stop strings; neighbours notice nothing."""

import time

import pytest

from nosa_jax.errors import InputError
from nosa_jax.infer import RequestStatus, SamplingParams
from nosa_jax.tokenizer import ByteTokenizer
from tests.infer.cases import ONE_LAYER, ROWS, offloaded, random_model
from tests.infer.scheduling import GREEDY, NEW, PARAMS, PROMPTS, assert_all_free, either, turn, turn_until


@either
@pytest.mark.parametrize("state", ["queued", "reading", "first token on its way", "decoding", "last token on its way"])
def test_cancellation_in_every_state(engine, solo, state):
    """The request ends with the tokens it had, and its neighbours and successors get what they get alone."""
    beside = [engine.submit(PROMPTS[i], PARAMS[i]) for i in (0, 2)]
    turn(engine)
    mine = engine.submit(PROMPTS[8], PARAMS[8])
    if state == "queued":
        assert mine.cancel()
        assert mine.status is RequestStatus.DONE, "nobody needs to be in a round for it"
    else:
        turn_until(engine, {
            "reading": lambda: mine.status is RequestStatus.READING,
            "first token on its way": lambda: mine.status is RequestStatus.DECODING,
            "decoding": lambda: len(mine.tokens) >= 4,
            "last token on its way": lambda: len(mine.tokens) >= NEW - 1,
        }[state])  # fmt: skip
        assert mine.cancel()
    had = len(mine.tokens)
    result = mine.result()
    assert (result.finish_reason, result.tokens) == ("cancelled", PARAMS[8] and solo[8][:had])
    assert list(mine) == result.tokens
    assert not mine.cancel(), "it is done already"
    after = engine.submit(PROMPTS[8], PARAMS[8])
    assert [h.result().tokens for h in (*beside, after)] == [solo[0], solo[2], solo[8]]
    assert engine.metrics().cancelled == 1


@either
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6])
def test_nothing_comes_after_a_cancellation_in_its_own_callback(engine, solo, at):
    """Not even tokens of the dispatch that is being handed out."""
    told: list[int] = []

    def on_token(token: int) -> None:
        told.append(token)
        if len(told) == at:
            assert mine.cancel()

    mine = engine.submit(PROMPTS[0], PARAMS[0], on_token=on_token)
    result = mine.result()
    assert (result.finish_reason, result.tokens) == ("cancelled", solo[0][:at])
    assert told == result.tokens


@either
def test_a_request_ends_when_its_time_is_over(engine, solo):
    """While it waits, and while it decodes; the result holds what came in time."""
    running = engine.submit(
        PROMPTS[0], SamplingParams(max_new_tokens=200), timeout=0.3, on_token=lambda _: time.sleep(0.005)
    )
    first = next(iter(running))
    result = running.result()
    assert result.finish_reason == "timeout"
    assert result.tokens[0] == first == solo[0][0]
    assert 0 < len(result.tokens) < 200
    crowd = [engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=200)) for _ in range(ROWS)]
    turn(engine)
    waiting = engine.submit(PROMPTS[0], timeout=0.01)
    time.sleep(0.02)
    assert waiting.result().tokens == []
    assert waiting.result().finish_reason == "timeout"
    for handle in crowd:
        handle.cancel()
    engine.run_until_idle()
    assert engine.metrics().timed_out == 2
    with pytest.raises(InputError, match="timeout=0 must be"):
        engine.submit(PROMPTS[0], timeout=0)


def test_a_result_may_be_waited_for_in_parts(engine, solo):
    handle = engine.submit(PROMPTS[0])
    with pytest.raises(TimeoutError, match=r"the request is queued and has 0 tokens"):
        handle.result(timeout=0)
    handle.cancel()


@either
def test_a_callback_that_raises_ends_its_own_request(engine, solo):
    def refuse(token):
        seen.append(token)
        if len(seen) == 3:
            raise ValueError("the reader has gone")

    seen: list[int] = []
    beside = engine.submit(PROMPTS[0], GREEDY)
    mine = engine.submit(PROMPTS[1], GREEDY, on_token=refuse)
    engine.run_until_idle()
    assert beside.result().tokens == solo[0]
    with pytest.raises(ValueError, match="the reader has gone"):
        mine.result()
    assert mine.tokens == seen == solo[1][:3]
    with pytest.raises(ValueError, match="the reader has gone"):
        list(mine)
    assert engine.metrics().failed == 1


@either
def test_no_and_one_token(engine, solo):
    none, one = (engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=n)) for n in (0, 1))
    assert none.done
    assert none.result().tokens == []
    assert list(one) == solo[0][:1]


@pytest.mark.slow
def test_stop_strings_end_a_row_that_the_device_would_go_on_with():
    model = random_model(ONE_LAYER.replace(vocab_size=259))
    with offloaded(model, tokenizer=ByteTokenizer()) as engine:
        free = engine.submit("hello", SamplingParams(max_new_tokens=20, temperature=1.0)).result()
        stop = free.text[8:10]
        at = free.text.index(stop)
        ended = engine.submit("hello", SamplingParams(max_new_tokens=20, temperature=1.0, stop=(stop,)))
        beside = engine.submit("hello", SamplingParams(max_new_tokens=20, temperature=1.0))
        assert (ended.result().finish_reason, ended.result().text) == ("stop", free.text[:at])
        assert ended.result().tokens == free.tokens[: len(ended.tokens)]
        assert beside.result().tokens == free.tokens
        assert_all_free(engine)


@either
def test_nothing_is_left_on_its_way_when_all_have_ended(engine, solo):
    """The step behind an end that nobody foresaw: rows are free for `prefill`, and idle time is no step's."""
    eos = next(token for i, token in enumerate(solo[0]) if i and token not in solo[0][:i])
    params = SamplingParams(max_new_tokens=NEW, eos_ids=(eos,))
    assert engine.generate([PROMPTS[0]], params)[0].finish_reason == "eos"
    engine.prefill([PROMPTS[0]])
    engine.generate([PROMPTS[0]], params)
    longest = engine.metrics().step_seconds.longest
    time.sleep(longest + 1.0)
    engine.generate([PROMPTS[0]], params)
    assert engine.metrics().step_seconds.longest < longest + 1.0
    engine.warm_up(sampling=False)
