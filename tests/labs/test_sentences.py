"""Words follow intervals: rises, falls, or neither."""

from regard.labs.sentences import list_intervals, mean_share, spell_change


def test_a_change_is_named_only_where_its_interval_leaves_out_none() -> None:
    assert spell_change({"mean": 2.0, "low": 1.0, "high": 3.0}) == (
        "rises by 2 (95% interval 1 to 3)"
    )
    assert spell_change({"mean": -2.0, "low": -3.0, "high": -1.0}) == (
        "falls by 2 (95% interval 1 to 3)"
    )
    assert spell_change({"mean": 0.5, "low": -1.0, "high": 2.0}) == (
        "does not clearly change (+0.5, 95% interval -1 to 2)"
    )
    assert "does not clearly change (-0.5," in spell_change({"mean": -0.5, "low": -2, "high": 1})


def test_shares_end_at_nothing_and_at_all() -> None:
    found = mean_share([0.9, 1.0])
    assert found["high"] == 1.0 and found["low"] < 0.9
    assert mean_share([0.0, 0.1])["low"] == 0.0


def test_several_means_stand_in_one_list() -> None:
    one, other = {"mean": 1.0, "low": 0.5, "high": 1.5}, {"mean": 2.0, "low": 2.0, "high": 2.0}
    long = {"mean": 27604.4, "low": 999.4, "high": 0.01234}
    assert list_intervals({"c": long}) == "c 27,604 (999 to 0.0123)"
    assert list_intervals({"a": one, "b": other}, ".1f") == "a 1.0 (0.5 to 1.5), b 2.0 (2.0 to 2.0)"
