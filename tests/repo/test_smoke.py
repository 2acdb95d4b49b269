"""`python -m tp_ext.smoke`, which users run without the tests: it passes here, and says so; with a mistake it fails."""

import pytest

from tp_ext import smoke


def test_it_passes(capfd: pytest.CaptureFixture[str]) -> None:
    assert smoke.main() == 0
    lines = capfd.readouterr().out.splitlines()
    assert sum(line.endswith(": right") for line in lines) == 4
    assert lines[-1].startswith("smoke: tp_ext works with torch ")


@pytest.mark.parametrize("name, check", [("full_state_dict", "checkpoint"), ("vocab_parallel_cross_entropy", "loss")])
def test_a_wrong_result_is_an_error(name: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: object, **options: object) -> object:
        result, calls[0] = right(*args, **options), calls[0] + 1
        return {key: value + calls[0] for key, value in result.items()} if isinstance(result, dict) else result + 1

    calls, right = [0], getattr(smoke, name)
    monkeypatch.setattr(smoke, name, wrong)
    with pytest.raises(AssertionError):
        getattr(smoke, f"_check_{check}")()
