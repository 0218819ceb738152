"""A pretended cluster on the PATH that remembers what was submitted; what its jobs do is the test's choice."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gradbench.config import Resources
from gradbench.sweep.job import Job
from tests.sweep.slurm.programs import Programs
from tests.tracking.folders import make_spec

CONFIG = """AccountingStorageEnforce = {enforce}
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = hill
KillWait                = 30 sec
MaxArraySize            = {max_array_size}
MaxJobCount             = 10000
"""
PARTITIONS = "cpu*|2:00:00|REQUEUE|(null)\ngpu|infinite|OFF|gpu:a100:4\n"
TOO_LARGE = "sbatch: error: Batch job submission failed: Invalid job array specification"
FULL = (
    "sbatch: error: AssocMaxSubmitJobLimit\\nsbatch: error: Batch job submission failed: "
    "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
)
"""As SLURM 22.05 says it: the reason comes first."""
SBATCH = """
for script; do :; done
tasks=$(($(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$script" | grep . || echo 0) + 1))
cd {folder}
refuse() {{ printf "$1\\n" >&2; exit 1; }}
[ ! -e refusal ] || [ "$(ls jobs | wc -l)" -lt "$(cat refused_from)" ] || refuse "$(cat refusal)"
[ "$tasks" -le {max_array_size} ] || refuse "{too_large}"
if [ -e room ]; then
    [ "$tasks" -le "$(cat room)" ] || refuse "{full}"
    echo $(($(cat room) - tasks)) >room
fi
job=1
while ! mkdir "jobs/$job" 2>/dev/null; do job=$((job + 1)); done
cp "$script" "jobs/$job/script"
env >"jobs/$job/environment"
[ "$tasks" -gt 1 ] && name="${{job}}_[0-$((tasks - 1))]" || name=$job
echo "$name|PENDING|0||N/A|N/A|0:00|Priority|" >>queue
echo "Submitted batch job $job"
"""


@dataclass(frozen=True)
class Submitted:
    """What sbatch was given."""

    script: str
    environment: dict[str, str]

    @property
    def options(self) -> dict[str, str]:
        """The lines that begin with #SBATCH; one without a value is there as itself."""
        lines = re.findall(r"^#SBATCH --(.*)$", self.script, re.MULTILINE)
        return dict((*line.partition("=")[::2],) for line in lines)

    @property
    def tasks(self) -> int:
        found = re.fullmatch(r"0-(\d+)%\d+", self.options.get("array", "0-0%1"))
        assert found, "an array that does not begin at 0"
        return int(found[1]) + 1

    @property
    def throttle(self) -> int:
        return int(self.options["array"].partition("%")[2]) if "array" in self.options else 1


class Slurm:
    """Accounting knows nothing, and what was submitted waits, until the test says more (`programs.say`)."""

    def __init__(self, folder: Path, *, max_array_size: int = 1001, max_submit: int | None = None) -> None:
        self.bin, self._folder = folder / "bin", folder
        for each in (self.bin, folder / "jobs"):
            each.mkdir(parents=True)
        self.programs = say = Programs(self.bin)
        settings = {"folder": folder, "max_array_size": max_array_size, "too_large": TOO_LARGE, "full": FULL}
        say.say("sbatch", before=SBATCH.format(**settings))
        enforce = "none" if max_submit is None else "associations,limits"
        say.say("scontrol", CONFIG.format(max_array_size=max_array_size, enforce=enforce))
        say.say("sinfo", PARTITIONS)
        limit = f'case "$*" in *qos*) ;; *) echo "phys|phys|{max_submit}|" ;; esac'
        say.say("sacctmgr", before=limit)
        say.say("squeue", before=f"cat {folder}/queue 2>/dev/null")
        for name in ("sacct", "scancel", "srun"):
            say.say(name)

    def has_room_for(self, tasks: int) -> None:
        """Let sbatch take so many tasks more, and then refuse for the time being."""
        (self._folder / "room").write_text(str(tasks))

    def refuses(self, text: str, *, after: int = 0) -> None:
        """Let sbatch refuse all that comes after so many jobs."""
        (self._folder / "refused_from").write_text(str(after))
        (self._folder / "refusal").write_text(text)

    def accepts(self) -> None:
        """Let sbatch take what comes."""
        (self._folder / "refusal").unlink()

    @property
    def submitted(self) -> list[Submitted]:
        """Everything that was submitted, in its order; the first has the job id 1."""
        folders = sorted((self._folder / "jobs").iterdir(), key=lambda path: int(path.name))
        return [Submitted((path / "script").read_text(), _variables(path / "environment")) for path in folders]


def _variables(path: Path) -> dict[str, str]:
    return dict((*line.partition("=")[::2],) for line in path.read_text().splitlines())


def make_jobs(sweep: Path, number: int, resources: Resources | None = None) -> list[Job]:
    """Return cells of a sweep as a launcher takes them; nothing of them is on disk."""
    specs = [make_spec(f"{n:012x}", f"vit·adam·standard·s{n}", seed=n) for n in range(number)]
    return [Job(sweep / spec.id, spec, resources or Resources()) for spec in specs]
