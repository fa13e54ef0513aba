"""Token budgets of tasks that spend at the same time."""

import asyncio
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.agents import AssistantMessage, Usage
from bottega.errors import BudgetExhaustedError, SubagentQuotaExceededError
from bottega.subagents.budget import (
    DOLLARS,
    MAX_OUTPUT,
    Account,
    Reservation,
    billionths,
    grant,
)
from bottega.subagents.handle import SubagentStatus
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.swarm import Swarm, SwarmOptions
from tests.domain.scripted import Notes, call, tokens
from tests.domain.subagents import (
    Heard,
    Model,
    after,
    await_all,
    by_hand,
    coordinator,
    dispatch,
    passed,
    put,
    registry,
    results,
    settled,
)
from tests.domain.virtual import run_virtual


def spends(tokens: int, answer: str = "done", **message: Any) -> AssistantMessage:
    usage = Usage(input=tokens - 10, output=10)
    return AssistantMessage(content=answer, usage=usage, **message)


def looking(tokens: int) -> AssistantMessage:
    return spends(tokens, "I look.", tool_calls=(call("list_files"),))


def test_budget_exhausted_in_flight_ends_the_task_and_not_its_parent() -> None:
    async def run() -> None:
        model = Model(
            go=[
                [dispatch("greedy", token_budget=5_000), dispatch("modest")],
                await_all,
                "went on",
            ],
            greedy=[after(1, looking(4_000)), after(1, looking(900)), "never"],
            modest=[after(5, "fine")],
        )
        async with registry(SubagentLimits(max_depth=1)) as where:
            recorder = Notes()
            recorder.swarm = Swarm(where, SwarmOptions(listener=(heard := Heard())))
            lead = coordinator(model, where)
            response = await lead.execute_query_async("go", recorder=recorder)
            assert response.content == "went on"
            greedy, modest = results(lead.conversation_history)[-1]["tasks"]
            assert greedy["status"] == "failed"
            assert "is used up: 4900 of 5000 tokens" in greedy["error"]
            assert greedy["token_usage"] == {"input": 4880, "output": 20}  # failed, yet counted
            assert modest["final_output"] == "fine"
            (failed,) = heard.data("failed")
            assert failed["error"]["code"] == "budget_exhausted"
            assert failed["token_usage"] == tokens(4880, 20)
            assert response.usage.tokens.total_tokens == 4900 + 4 * 15

    run_virtual(run())


def test_tight_budget_caps_the_providers_answer() -> None:
    async def run() -> None:
        model = Model(
            go=[[dispatch("tight", token_budget=2_000), dispatch("wide")], await_all, "end"],
            tight=["t"],
            wide=["w"],
        )
        async with registry() as where:
            await coordinator(model, where).execute_query_async("go")
            caps = {
                asked: options.max_output_tokens if options else None
                for asked, options in zip(model.asked, model.options, strict=True)
            }
            assert caps["wide"] is caps["go"] is None
            assert caps["tight"] is not None
            assert 1_000 < caps["tight"] < 2_000

    run_virtual(run())


def test_tasks_of_a_parent_share_its_budget() -> None:
    async def run() -> None:
        limits = SubagentLimits(max_total_tokens=6_000)
        model = Model(
            go=[dispatch("a"), await_all, dispatch("b"), "end"],
            a=[spends(6_000)],
        )
        async with registry(limits) as where:
            recorder = Notes()
            recorder.swarm = Swarm(where, SwarmOptions(listener=(heard := Heard())))
            lead = coordinator(model, where)
            assert (await lead.execute_query_async("go", recorder=recorder)).content == "end"
            refused = results(lead.conversation_history)[-1]
            assert "6000 of 6000 tokens are spent" in refused["error"]
            (told,) = heard.data("backpressure")
            assert (told["code"], told["size"]) == ("subagent_quota_exceeded", 6_000)

    run_virtual(run())


def test_tasks_below_a_task_spend_from_its_budget_too() -> None:
    async def run() -> None:
        model = Model(
            go=[dispatch("mid", agent="helper", token_budget=9_000), await_all, "end"],
            mid=[dispatch("x"), await_all, "never"],
            x=[spends(8_900)],
        )
        async with registry() as where:
            mid = coordinator(model, where, description="helps")
            mid.agent_name = "helper"
            lead = coordinator(model, where, mid)
            await lead.execute_query_async("go")
            (task,) = results(lead.conversation_history)[-1]["tasks"]
            assert task["status"] == "failed"
            assert "is used up" in task["error"]
            assert task["token_usage"] == {"input": 20, "output": 10}  # its own calls

    run_virtual(run())


def test_account_outside_the_run_is_asked_but_not_charged() -> None:
    async def run() -> None:
        daily = Account("what is left for today", 10_000, spent=9_900)
        model = Model(go=[dispatch("a"), await_all, "end"], a=["never"])
        async with registry() as where:
            recorder = Notes()
            recorder.swarm = Swarm(where, SwarmOptions(outer=(daily,)))
            lead = coordinator(model, where)
            await lead.execute_query_async("go", recorder=recorder)
            (task,) = results(lead.conversation_history)[-1]["tasks"]
            assert "what is left for today is used up" in task["error"]
            assert (daily.spent, daily.reserved) == (9_900, 0)

    run_virtual(run())


def test_dispatch_without_tokens_left_is_refused() -> None:
    async def run() -> None:
        async with registry() as where:
            parent = by_hand(where)
            parent.account.spent = 500_000
            with pytest.raises(SubagentQuotaExceededError, match="used up"):
                put(where, parent)

    run_virtual(run())


class TestReserving:
    def test_call_that_only_reservations_block_waits(self) -> None:
        async def run() -> None:
            account = Account("budget", 1_000)
            order = []

            async def spend(name: str, sent: int, seconds: float) -> None:
                async with Reservation([account], sent) as permit:
                    order.append((name, permit.most))
                    await passed(seconds)
                account.spent += 100

            first = asyncio.create_task(spend("first", 200, 2))
            await settled()
            stopped = asyncio.create_task(spend("stopped", 200, 2))
            second = asyncio.create_task(spend("second", 300, 2))
            await passed(1)
            assert order == [("first", 800)]
            stopped.cancel()
            await asyncio.wait([stopped, first, second])
            assert stopped.cancelled()
            assert order == [("first", 800), ("second", 600)]
            assert (account.spent, account.reserved) == (200, 0)
            assert asyncio.get_running_loop().time() == 4

        run_virtual(run())

    def test_failed_call_returns_its_reservation(self) -> None:
        async def run() -> None:
            account = Account("budget", 1_000)
            with pytest.raises(ValueError, match="no"):
                async with Reservation([account], 10):
                    raise ValueError("no")
            assert (account.left, account.reserved) == (1_000, 0)

        run_virtual(run())

    @given(
        limit=st.integers(0, 20_000),
        spent=st.integers(0, 20_000),
        held=st.integers(0, 20_000),
        sent=st.integers(0, 8_000),
    )
    def test_grant_never_exceeds_the_remaining_tokens(
        self, limit: int, spent: int, held: int, sent: int
    ) -> None:
        account = Account("budget", limit, spent=spent, reserved=held)
        try:
            most = grant([Account("no limit"), account], sent)
        except BudgetExhaustedError:
            assert spent + sent + 16 > limit
            return
        if isinstance(most, Account):
            assert most is account
            assert held > 0
            assert spent + held + sent + 16 > limit
        else:
            assert 16 <= most <= MAX_OUTPUT
            assert spent + held + sent + most <= limit

    @settings(deadline=None)
    @given(
        limit=st.integers(1_000, 20_000),
        calls=st.lists(
            st.tuples(st.integers(10, 3_000), st.integers(1, 5), st.integers(0, MAX_OUTPUT)),
            max_size=12,
        ),
    )
    def test_concurrent_calls_never_overspend(
        self, limit: int, calls: list[tuple[int, int, int]]
    ) -> None:
        async def run() -> None:
            account = Account("budget", limit)
            own = [Account("own", 6_000) for _ in calls]

            async def task(index: int) -> None:
                sent, seconds, output = calls[index]
                paying = [own[index], account]
                while True:
                    async with Reservation(paying, sent) as permit:
                        assert account.spent + account.reserved <= limit
                        await passed(seconds)
                    for each in paying:
                        each.spent += sent + min(output, permit.most or MAX_OUTPUT)

            tasks = [asyncio.create_task(task(index)) for index in range(len(calls))]
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, BudgetExhaustedError) for end in ends)
            assert account.spent <= limit
            assert all(each.spent <= 6_000 for each in own)
            assert account.reserved == sum(each.reserved for each in own) == 0
            assert account._returned is None

        run_virtual(run())


def test_work_that_raises_the_budget_error_has_its_outcome() -> None:
    async def run() -> None:
        async def broke(handle: Any) -> Any:
            raise BudgetExhaustedError("the run's budget is used up")

        async with registry() as where:
            handle = put(where, by_hand(where), work=broke)
            await settled()
            assert handle.status is SubagentStatus.FAILED
            assert (handle.error_code, handle.error) == (
                "budget_exhausted",
                "the run's budget is used up",
            )

    run_virtual(run())


class _Prices:
    """Prices of 2 dollars per million tokens of input, and 10 of output."""

    def cost(self, usage: Usage) -> Decimal:
        return (usage.input * Decimal(2) + usage.output * Decimal(10)) / 1_000_000


class _PricedModel(Model):
    async def prices(self) -> _Prices:
        return _Prices()


def priced(input_: int, output: int) -> Usage:
    usage = Usage(input=input_, output=output)
    return replace(usage, cost=_Prices().cost(usage))


def test_budget_of_money_bounds_the_answer_and_ends_the_run() -> None:
    account = Account("the run's cost_budget", billionths(Decimal("0.01")), unit=DOLLARS)
    assert grant([account], 100, _Prices()) == 980  # (10 000 - 200) / 10 millionths
    account.spend(priced(1_000, 700))
    assert grant([account], 100, _Prices()) == 80
    account.spend(priced(0, 70))
    with pytest.raises(BudgetExhaustedError, match=r"0\.0097 of 0\.01 US dollars are spent"):
        grant([account], 100, _Prices())
    assert grant([account], 100, None) == MAX_OUTPUT  # a model without a price


def test_concurrent_calls_cannot_spend_the_same_money() -> None:
    async def run() -> None:
        account = Account("budget", billionths(Decimal("0.05")), unit=DOLLARS)
        model = _PricedModel(x=["y"])
        order: list[tuple[str, int | None]] = []

        both = asyncio.Barrier(2)

        async def one(name: str) -> None:
            async with Reservation([account], 1_000, model) as permit:
                order.append((name, permit.most))
                await both.wait()
                account.spend(priced(1_000, 1_000))

        await asyncio.gather(one("a"), one("b"))
        # The first reserves 0.002 dollars for its input and 0.04096 for 4096 tokens of output.
        assert order == [("a", None), ("b", 504)]
        assert account.reserved == 0

    run_virtual(run())
