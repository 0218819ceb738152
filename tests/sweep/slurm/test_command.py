"""S10, and how a program of SLURM can fail."""

import time

import psutil
import pytest

from gradbench.sweep.slurm.command import NoAnswer, SlurmError, environment, run
from tests.sweep.slurm.programs import NO_CONTROLLER, SACCT_OFF


def test_it_returns_what_the_program_prints(programs):
    programs.say("sacct", "one\ntwo\n")
    assert run("sacct", "-X", "--jobs=1,2") == "one\ntwo\n"
    assert programs.calls("sacct") == ["-X --jobs=1,2"]


def test_S10_of_slurms_variables_only_SLURM_CONF_survives(programs, monkeypatch):
    leaks = ("SLURM_CPU_BIND", "SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE", "SLURM_JOB_ID", "SLURM_CLUSTERS")
    tastes = ("SQUEUE_FORMAT", "SQUEUE_SORT", "SACCT_FORMAT", "SINFO_FORMAT", "SCANCEL_INTERACTIVE", "SCONTROL_ALL")
    for name in (*leaks, *tastes):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    programs.say("squeue")
    run("squeue")
    seen = programs.environment("squeue")
    ours = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
    assert {name: seen[name] for name in seen if name.startswith("SLURM_") or name in tastes} == ours
    assert (seen["HOME"], seen["LANG"], seen["LC_ALL"]) == ("/home/me", "C", "C")


def test_without_SLURM_CONF_none_is_made_up(monkeypatch):
    monkeypatch.delenv("SLURM_CONF", raising=False)
    assert "SLURM_CONF" not in environment()


def test_a_program_that_is_not_there(programs):
    with pytest.raises(SlurmError, match=r"^sacct is not on the PATH$"):
        run("sacct")


def test_a_program_that_may_not_be_run(programs, tmp_path):
    (tmp_path / "bin" / "sacct").write_bytes(b"\x7fELF")
    (tmp_path / "bin" / "sacct").chmod(0o755)
    with pytest.raises(SlurmError, match=r"^sacct can't be started: "):
        run("sacct")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SACCT_OFF, f"sacct: {SACCT_OFF}"),
        ("sacct: error: first\nsacct: error: Access denied\n\n", "sacct: Access denied"),
        ("sacct: fatal: Bad job/step specified: x", "sacct: Bad job/step specified: x"),
    ],
)
def test_an_error_is_the_programs_last_sentence(programs, error, message):
    programs.say("sacct", error=error)
    with pytest.raises(SlurmError) as raised:
        run("sacct")
    assert str(raised.value) == message
    assert not isinstance(raised.value, NoAnswer)


def test_a_silent_failure_has_its_exit_code(programs):
    programs.say("sacct", code=3)
    with pytest.raises(SlurmError, match=r"^sacct: exit code 3$"):
        run("sacct")


def test_an_error_with_exit_code_0_and_no_answer_is_an_error(programs):
    programs.say("sacct", error="sacct: error: slurm_persist_conn_open: Connection refused", code=0)
    with pytest.raises(NoAnswer):
        run("sacct")


def test_a_warning_beside_an_answer_is_none(programs):
    programs.say("sacct", "7|COMPLETED\n", error="sacct: error: some plugin is old", code=0)
    assert run("sacct") == "7|COMPLETED\n"


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        ("squeue", NO_CONTROLLER, "slurmctld does not answer (squeue: slurm_load_jobs error: Unable to contact"),
        ("sacct", "sacct: error: Problem talking to the database: Connection refused", "slurmdbd does not answer"),
        ("scontrol", "slurm_load_ctl_conf error: Socket timed out on send/recv operation", "slurmctld does not"),
    ],
)
def test_a_daemon_that_is_down_is_told_apart(programs, program, error, message):
    programs.say(program, error=error)
    with pytest.raises(NoAnswer) as raised:
        run(program)
    assert str(raised.value).startswith(message)


def test_a_program_that_hangs_is_killed_with_what_it_started(programs, tmp_path):
    programs.say("sacct", before=f"/bin/sleep 300 & echo $! >{tmp_path}/pid\nwait")
    before = time.monotonic()
    with pytest.raises(NoAnswer, match=r"^slurmdbd does not answer \(sacct: nothing in 0.5 s\)$"):
        run("sacct", timeout_s=0.5)
    assert time.monotonic() - before < 5
    sleeper = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(sleeper) or psutil.Process(sleeper).status() == psutil.STATUS_ZOMBIE


def test_output_that_is_no_utf8_is_read_all_the_same(programs):
    programs.say("squeue", before=r"printf 'm\374ller\n'")
    assert run("squeue") == "m\ufffdller\n"
