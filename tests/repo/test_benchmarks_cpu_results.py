"""cpu_results: which rows of a folder of CSV files count, and what table, goals and exceptions are made of them."""

import csv

import pytest

from benchmarks import cpu_results

COLUMNS = ("commit", "dtype", "threads", "case", "peer", "ratio")


def saved(folder, kernel, *rows):
    with (folder / f"bench_{kernel}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(dict(zip(COLUMNS, row, strict=True)) for row in rows)


@pytest.fixture
def folder(tmp_path):
    one, two = ("new", "float32", 1), ("new", "bfloat16", 2)
    saved(
        tmp_path,
        "norm",
        ("old", "float32", 1, "rms_norm 128 fwd", "torch eager", 0.1),
        (*one, "rms_norm 128 fwd", "torch eager", 9.0),  # of an interrupted run
        (*one, "rms_norm 128 fwd", "torch eager", 4.0),
        (*one, "rms_norm 1024 fwd", "torch eager", 2.0),
        (*one, "rms_norm residual 128 fwd+bwd", "torch eager", 1.6),
        (*one, "layer_norm residual 128 fwd+bwd", "torch eager", 1.4),
        (*two, "layer_norm 128 bwd", "torch eager", 0.9),
    )
    saved(
        tmp_path,
        "gated_act",
        (*one, "swiglu fwd", "torch eager", 1.3),
        (*one, "swiglu fwd", "another", 1.2),
        (*one, "alone", "", ""),  # no peer
    )
    (tmp_path / "bench_mlp.csv").write_text("commit,case,ratio\nnew,dense,3\n")  # another harness
    return tmp_path


def test_the_fastest_peer_of_the_last_run_counts(folder):
    rows = {(row["family"], row["case"]): (row["pass"], float(row["ratio"])) for row in cpu_results.read_rows(folder)}
    assert rows == {
        ("rms_norm", "rms_norm 128 fwd"): ("fwd", 4.0),
        ("rms_norm", "rms_norm 1024 fwd"): ("fwd", 2.0),
        ("rms_norm residual", "rms_norm residual 128 fwd+bwd"): ("fwd+bwd", 1.6),
        ("layer_norm residual", "layer_norm residual 128 fwd+bwd"): ("fwd+bwd", 1.4),
        ("layer_norm", "layer_norm 128 bwd"): ("bwd", 0.9),
        ("gated_act", "swiglu fwd"): ("fwd", 1.2),
    }


def test_goals_count_the_rows_that_reach_them(folder):
    goals = {goal["goal"]: goal for goal in cpu_results.goals(cpu_results.read_rows(folder))}
    assert set(goals) == {
        "bias_act",
        "gated_act",
        "bias_dropout_residual",
        "norm residual",
        "vocab_cross_entropy fwd+bwd",
        "every row",
    }
    norm, every = goals["norm residual"], goals["every row"]
    assert (norm["median"], norm["lowest"], norm["rows that reach it"]) == (1.5, 1.4, "1 of 2")
    assert (every["lowest"], every["rows that reach it"]) == (0.9, "5 of 6")
    assert goals["bias_act"]["median"] is None and goals["bias_act"]["rows that reach it"] == "0 of 0"


def test_table_and_rows_below_the_goal(folder, capsys):
    cpu_results.main([str(folder)])
    printed = capsys.readouterr().out
    assert printed.index("0.90: layer_norm, layer_norm 128 bwd, bfloat16, threads: 2") < printed.index(
        "1.20: gated_act"
    )
    cpu_results.main([str(folder), "--markdown"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| kernel | pass | float32, 1 thread | bfloat16, 2 threads |"
    assert "| rms_norm | fwd | 3.00 (2.00) |  |" in lines and "| layer_norm | bwd |  | 0.90 |" in lines


def test_a_folder_without_kernels_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"no bench_\*\.csv in it times a kernel on a CPU"):
        cpu_results.main([str(tmp_path)])
