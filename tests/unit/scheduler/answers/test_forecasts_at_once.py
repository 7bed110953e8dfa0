"""How many simulations there are at a time, whoever asks for how many."""

from scheduler_world import World

from cpumond.scheduler.answers.forecasts import MOST_SIMULATIONS, TOO_MANY, Forecasts, Question
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings.operations import StartOperation
from cpumond.scheduler.trial.forward import Pace


async def test_simulations_at_once_agree_with_those_one_after_the_other(world: World) -> None:
    spec = {"pool": "p", "tasks": {"main": {"job_count": 1, "command": "true"}}}
    question = Question((StartOperation(spec),), User("ann", admin=True))

    forecasts = Forecasts(world.state, lambda: world.now, lambda: Pace(1.0, 1.0, 0.0, {}), 60.0, 0.1, 100.0)
    asked = [await forecasts.simulate(question) for _ in range(5)]
    first = [(await anext(each)).error for each in asked]
    for each in asked:
        await each.aclose()  # type: ignore[attr-defined]  # it is a generator
    assert first == [""] * MOST_SIMULATIONS + [TOO_MANY] * (5 - MOST_SIMULATIONS)
