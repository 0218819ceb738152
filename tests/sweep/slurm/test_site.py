import pytest

from gradbench.config import UserError
from gradbench.sweep.slurm.command import NoAnswer, SlurmError
from gradbench.sweep.slurm.site import Partition, Site
from tests.sweep.slurm.programs import NO_CONTROLLER

CONFIG = """Configuration data as of 2026-01-01T00:00:00
AccountingStorageEnforce = associations,limits
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = hill
KillWait                = 30 sec
MaxArraySize            = 1001
MaxJobCount             = 10000
PreemptMode             = REQUEUE

Slurmctld(primary) at hill is UP
"""
SINFO = """cpu*|2:00:00|REQUEUE|(null)
gpu|1-00:00:00|CANCEL|(null)
gpu|1-00:00:00|CANCEL|gpu:a100:4(S:0-1)
gpu|1-00:00:00|CANCEL|(null)
odd|infinite|OFF|nvme:1,gpu:2
disk|infinite|OFF|gpudisk:1
"""
# default account, account, MaxSubmitJobs, default QOS
ASSOCIATIONS = "phys|phys|100|\nphys|math|20|\nphys|math|30|short\n"
QOS = "normal|\nshort|5\nlong|50\n"


@pytest.fixture
def hill(programs):
    """Return `hill(...)`: a site whose programs say what is given, else the above."""

    def make(config=CONFIG, sinfo=SINFO, associations=ASSOCIATIONS, qos=QOS):
        programs.say("scontrol", config)
        programs.say("sinfo", sinfo)
        programs.say("sacctmgr", before=f'case "$*" in *qos*) printf "{qos}" ;; *) printf "{associations}" ;; esac')
        return programs

    return make


def test_its_facts(hill):
    programs = hill()
    site = Site.ask()
    assert (site.cluster, site.max_array_size, site.max_job_count, site.kill_wait_s) == ("hill", 1001, 10000, 30)
    assert site.accounting
    assert len(programs.calls("scontrol")) == len(programs.calls("sinfo")) == 1


def test_its_partitions(hill):
    hill()
    assert Site.ask().partitions == (
        Partition("cpu", True, 120, False, "REQUEUE"),
        Partition("gpu", False, 1440, True, "CANCEL"),
        Partition("odd", False, None, True, "OFF"),
        Partition("disk", False, None, False, "OFF"),
    )


@pytest.mark.parametrize(
    ("names", "chosen", "gpus"),
    [(None, ["cpu"], False), ("", ["cpu"], False), ("gpu", ["gpu"], True), ("cpu,gpu", ["cpu", "gpu"], True)],
)
def test_the_partitions_of_a_job(hill, names, chosen, gpus):
    hill()
    site = Site.ask()
    assert [partition.name for partition in site.chosen(names)] == chosen
    assert site.has_gpus(names) is gpus


@pytest.mark.parametrize("names", ["gpus", "cpu,gpus"])
def test_a_partition_that_does_not_exist_is_named_with_those_that_do(hill, names):
    hill()
    with pytest.raises(UserError) as raised:
        Site.ask().chosen(names)
    line = "hydra.launcher.partition=gpus: no such partition; allowed: cpu, gpu, odd, disk"
    assert str(raised.value) == line


def test_a_site_without_a_default_partition_asks_for_a_name(hill):
    hill(sinfo=SINFO.replace("cpu*", "cpu"))
    with pytest.raises(UserError, match="no default; name one of cpu, gpu"):
        Site.ask().chosen(None)


@pytest.mark.parametrize(
    ("account", "qos", "limit"),
    [(None, None, 100), ("phys", "short", 5), ("math", None, 5), ("math", "long", 50), ("math", "normal", 20)],
)
def test_how_many_jobs_the_user_may_submit(hill, account, qos, limit):
    """The QOS goes before the association."""
    hill()
    assert Site.ask(account, qos).max_submit == limit


@pytest.mark.parametrize(
    "given",
    [
        {"config": CONFIG.replace("associations,limits", "none")},
        {"associations": "", "qos": ""},
        {"associations": "phys|phys||\n"},
    ],
)
def test_no_limit_is_none(hill, given):
    hill(**given)
    assert Site.ask().max_submit is None


def test_a_user_who_may_not_ask_accounting_has_no_known_limit(hill):
    hill().say("sacctmgr", error="sacctmgr: error: Access denied")
    assert Site.ask().max_submit is None


def test_accounting_may_be_off(hill):
    hill(config=CONFIG.replace("accounting_storage/slurmdbd", "(null)"))
    assert not Site.ask().accounting


def test_a_config_without_what_is_needed_is_an_error(hill):
    hill(config=CONFIG.replace("MaxArraySize", "MaxArrows"))
    with pytest.raises(SlurmError, match="no MaxArraySize"):
        Site.ask()


def test_a_slurmctld_that_is_down_is_one_line(hill):
    hill().say("scontrol", error=NO_CONTROLLER)
    with pytest.raises(NoAnswer, match="slurmctld does not answer"):
        Site.ask()
