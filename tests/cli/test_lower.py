"""--lower on the command line, and what `pipesim check` says of listed messages."""

from __future__ import annotations

from pathlib import Path

from pipesim import Schedule, generate, lower

SMALL = ("-p", 4, "-m", 8)


def test_export_lowers(pipesim, tmp_path: Path) -> None:
    for receives in ("early", "late"):
        run = pipesim("export", "1f1b", *SMALL, "--lower", receives, "-o", "x.csv")
        assert (run.returncode, run.stderr) == (0, "wrote x.csv\n")
        assert Schedule.from_csv(tmp_path / "x.csv") == lower(generate("1f1b", devices=4, microbatches=8), receives)


def test_a_file_is_lowered_once(pipesim, tmp_path: Path) -> None:
    (tmp_path / "bare.csv").write_text("0F0,0B0\n1F0,1B0\n")
    assert pipesim("export", "bare.csv", "--lower", "late", "-o", "listed.csv").returncode == 0
    assert (tmp_path / "listed.csv").read_text().splitlines() == ["0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0"]
    run = pipesim("export", "listed.csv", "--lower", "early", "-o", "again.csv")
    assert run.returncode == 1
    assert "listed.csv: the schedule lists SEND or RECV already" in run.stderr
    assert "--drop-communication" in run.stderr
    assert pipesim("export", "listed.csv", "--drop-communication", "--lower", "early", "-o", "again.csv").returncode == 0


def test_show_prints_the_listing(pipesim) -> None:
    run = pipesim("show", "gpipe", "-p", 2, "-m", 2, "--lower", "late")
    assert run.returncode == 0, run.stderr
    # by hand: every RECV right before its op, every SEND right after
    assert [line.split("|")[1].split() for line in run.stdout.splitlines() if line.startswith("device ")][:2] == [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1F0", "1RECV_F1", "1F1", "1B0", "1SEND_B0", "1B1", "1SEND_B1"],
    ]


def test_a_crossing_is_said_by_export_and_refused_by_check(pipesim) -> None:
    # device 1 uses the gradient 3B0 before the activation 0F2, which device 0 sends in the other order
    run = pipesim("export", "zb-v", "-p", 2, "-m", 4, "--lower", "late", "-o", "crossed.csv")
    assert run.returncode == 0
    assert "Warning: messages cross" in run.stderr
    run = pipesim("check", "crossed.csv")
    assert (run.returncode, run.stdout) == (1, "")
    for word in ("messages cross", "0SEND_F2 (position 5)", "3SEND_B0 (position 9)", "2RECV_B0 (position 8)", "1RECV_F2 (position 11)"):
        assert word in run.stderr
    assert pipesim("check", "zb-v", "-p", 2, "-m", 4, "--lower", "early").returncode == 0


def test_a_saved_run_is_not_lowered(pipesim) -> None:
    assert pipesim("export", "gpipe", *SMALL, "-o", "run.json.gz").returncode == 0
    run = pipesim("export", "run.json.gz", "--lower", "early", "-o", "x.csv")
    assert run.returncode == 2
    assert "--lower would change nothing" in run.stderr
