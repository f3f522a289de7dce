# ruff: noqa: E501 (the tables read better with one script a line)
"""One small batch script for each mistake, and scripts that are right."""

from __future__ import annotations

import pytest

from dslaunch.config.check import Target
from dslaunch.config.check.files import check_file
from dslaunch.config.check.scripts import check_batch_script
from dslaunch.core.finding import Finding

HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\n"
ALONE = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gpus-per-node=8\n"
EIGHT = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n"
TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d train.py --deepspeed z.json"


def codes(text: str, *, info: bool = False) -> list[str]:
    return [f.code for f in check_batch_script(text, Target()) if info or f.severity != "info"]


def the(code: str, text: str) -> Finding:
    (one,) = [finding for finding in check_batch_script(text, Target()) if finding.code == code]
    return one


# name, script, code, severity, line
MISTAKES: list[tuple[str, str, str, str, int]] = [
    ("node id in double quotes", HEAD + f'srun bash -c "{TORCHRUN} --node_rank $SLURM_NODEID"\n',
     "rank-too-early", "error", 5),
    ("node id as an argument", HEAD + f"srun {TORCHRUN} --node-rank=$SLURM_NODEID\n", "rank-too-early", "error", 5),
    ("rank exported before srun", EIGHT + "export RANK=$SLURM_PROCID\nsrun python train.py\n",
     "rank-too-early", "error", 4),
    ("local rank on one node", "#!/bin/bash\n#SBATCH -N1 --ntasks-per-node=8\nsrun python t.py --local_rank ${SLURM_LOCALID}\n",
     "rank-too-early", "error", 3),
    ("node id in a script that is written", HEAD + "cat > run.sh <<EOF\npython t.py --node_rank $SLURM_NODEID\nEOF\nsrun bash run.sh\n",
     "rank-too-early", "error", 6),
    ("node id, nodes unknown", "#!/bin/bash\n#SBATCH -p gpu\nsrun python t.py --node_rank $SLURM_NODEID\n",
     "rank-too-early", "warning", 3),
    ("one gpu a task", "#!/bin/bash\n#SBATCH -N 2 --ntasks-per-node=8\n#SBATCH --gpus-per-task=1\nsrun python t.py\n",
     "gpus-per-task", "warning", 3),
    ("one gpu a task, of a type", "#!/bin/bash\n#SBATCH -n 16\nsrun --gpus-per-task=a100:1 python t.py\n",
     "gpus-per-task", "warning", 3),
    ("torchrun in every task", EIGHT + f"srun {TORCHRUN}\n", "launcher-per-task", "error", 4),
    ("deepspeed in every task", "#!/bin/bash\n#SBATCH -N1\n#SBATCH --ntasks-per-node=4\nsrun deepspeed t.py\n",
     "launcher-per-task", "error", 4),
    ("torchrun in every task in a container", EIGHT + "srun -l apptainer exec --nv i.sif bash -c 'torchrun t.py'\n",
     "launcher-per-task", "error", 4),
    ("deepspeed on every node", HEAD + "srun deepspeed --hostfile h t.py\n", "launcher-per-node", "error", 5),
    ("torchrun without srun", HEAD + TORCHRUN + "\n", "first-node-only", "warning", 5),
    ("deepspeed without hostfile", HEAD + "deepspeed --num_gpus 8 t.py\n", "first-node-only", "warning", 5),
    ("torch.distributed.launch without srun", HEAD + "python -m torch.distributed.launch t.py\n",
     "first-node-only", "warning", 5),
    ("a directive after a command", HEAD + "module load cuda\n#SBATCH --time=1:00:00\n", "directive-ignored", "warning", 6),
    ("a directive of PBS after a command", "#PBS -q gpu\nhostname\n#PBS -l walltime=1:0:0\n", "directive-ignored",
     "warning", 3),
    ("a variable in a directive", "#!/bin/bash\n#SBATCH --nodes=$NODES\nhostname\n", "directive-variable", "error", 2),
    ("a variable in a log's name", "#!/bin/bash\n#SBATCH -o ${HOME}/x.log\nhostname\n", "directive-variable", "error", 2),
    ("no first line", "#SBATCH -N 1\nhostname\n", "no-shebang", "error", 1),
    ("windows line ends", HEAD.replace("\n", "\r\n") + "hostname\r\n", "line-ends", "error", 1),
    ("windows line ends in PBS", "#PBS -q a\r\nhostname\r\n", "line-ends", "error", 1),
    ("the login node as master", HEAD + "export MASTER_ADDR=$SLURM_SUBMIT_HOST\n", "master-addr", "error", 5),
    ("the login node as master, PBS", "#PBS -q a\nexport MASTER_ADDR=${PBS_O_HOST}\n", "master-addr", "error", 2),
    ("localhost as master", HEAD + "export MASTER_ADDR=localhost\n", "master-addr", "error", 5),
    ("127.0.0.1 as master", HEAD + f"srun {TORCHRUN} --master_addr 127.0.0.1\n", "master-addr", "error", 5),
    ("each task its own master", HEAD + f"srun bash -c 'export MASTER_ADDR=$(hostname); {TORCHRUN}'\n",
     "master-addr", "error", 5),
    ("a nodelist cut", HEAD + "export MASTER_ADDR=$(echo $SLURM_JOB_NODELIST | cut -d, -f1)\n",
     "nodelist-cut", "warning", 5),
    ("a nodelist cut by the shell", HEAD + "M=${SLURM_NODELIST%%,*}\n", "nodelist-cut", "warning", 5),
    ("a nodelist as master", HEAD + 'export MASTER_ADDR="$SLURM_JOB_NODELIST"\n', "nodelist-cut", "warning", 5),
    ("a nodelist in words", HEAD + f'srun --nodelist="${{NODES[@]:0:2}}" {TORCHRUN}\n', "nodelist-split", "error", 5),
    ("tee hides a failure", HEAD + f"srun {TORCHRUN} 2>&1 | tee log\n", "pipe-hides-failure", "warning", 5),
    ("a signal without a trap", "#!/bin/bash\n#SBATCH --signal=B:USR1@120\nsrun deepspeed t.py\n",
     "signal-untrapped", "error", 2),
    ("a trap that waits", "#!/bin/bash\n#SBATCH --signal=B:USR1@120\ntrap 'kill -USR1 $P' USR1\ndeepspeed t.py\n",
     "trap-too-late", "warning", 3),
    ("a hostfile with repetitions", EIGHT + "srun hostname > hostfile\n", "hostfile-form", "error", 4),
    ("a node file as hostfile", "#PBS -l select=2:mpiprocs=4\ncd $PBS_O_WORKDIR\ndeepspeed --hostfile $PBS_NODEFILE t.py\n",
     "hostfile-form", "error", 3),
    ("an environment file that grows", HEAD + 'echo "A=1" >> ~/.deepspeed_env\n', "env-file-grows", "warning", 5),
    ("nodes beside select", "#PBS -l select=2 -l nodes=2:ppn=8\nhostname\n", "mixed-resources", "error", 1),
    ("PBS starts at home", "#PBS -q a\ndeepspeed t.py\n", "work-dir", "warning", 2),
    ("SGE starts at home", "#$ -q a\ndeepspeed t.py\n", "work-dir", "warning", 2),
    ("a command that SGE reads", "#$ -cwd\n#$HOME/bin/x\nhostname\n", "directive-form", "error", 2),
    ("LSF on its first host", "#BSUB -n 16\n#BSUB -R 'span[ptile=8]'\ntorchrun t.py\n", "first-node-only", "warning", 3),
    ("PBS on its first host", "#PBS -l select=2:ngpus=8\ncd /a\ndeepspeed t.py\n", "first-node-only", "warning", 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "code", "severity", "line"), [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES]
)
def test_a_mistake_is_named(text: str, code: str, severity: str, line: int) -> None:
    finding = the(code, text)
    assert (finding.severity, finding.line) == (severity, line)
    assert finding.message and finding.hint
    assert codes(text) == [code], "and nothing else is"


RIGHT: dict[str, str] = {
    "a launcher on each node": HEAD
    + "#SBATCH --signal=B:USR1@120\n#SBATCH --time=1:00:00\nset -euo pipefail\n"
    + 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
    + "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))\n"
    + "trap 'kill -USR1 $PID' USR1\n"
    + f"srun --kill-on-bad-exit=1 bash -c '{TORCHRUN} --node_rank $SLURM_NODEID \\\n"
    + "  --master_addr $MASTER_ADDR' 2>&1 | tee log-$SLURM_JOB_ID &\nPID=$!\nwait $PID\n",
    "an escaped variable": HEAD + f'srun bash -c "{TORCHRUN} --node_rank \\$SLURM_NODEID"\n',
    "a quoted here-document": HEAD
    + "cat > run-$SLURM_JOB_ID.sh <<'EOF'\ntorchrun --node_rank $SLURM_NODEID t.py\nEOF\n"
    + "srun bash run-$SLURM_JOB_ID.sh\n",
    "a task for each rank": EIGHT
    + "srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID python t.py'\n",
    "one launcher by srun's own options": EIGHT + f"srun --ntasks-per-node=1 {TORCHRUN}\n",
    "a launcher of one rank in each task": EIGHT + "srun torchrun --nproc_per_node=1 t.py\n",
    "deepspeed with a hostfile": HEAD + "deepspeed --hostfile hosts-$SLURM_JOB_ID t.py\n",
    "deepspeed without ssh": HEAD
    + "srun bash -c 'deepspeed --no_ssh --node_rank $SLURM_NODEID --hostfile h t.py'\n",
    "deepspeed on one node": ALONE + "conda activate deepspeed\npip install deepspeed\ndeepspeed t.py\n",
    "node id 0 on one node": ALONE + "deepspeed --node_rank $SLURM_NODEID t.py\n",
    "a config of that name": HEAD + "srun python train.py --deepspeed configs/deepspeed/z2.json\n",
    "a loop over nodes": HEAD
    + 'for n in $(scontrol show hostnames); do\n  srun -N1 -n1 -w "$n" '
    + TORCHRUN
    + " &\ndone\nwait\n",
    "ssh to each node": HEAD + 'for n in $NODES; do ssh "$n" ' + TORCHRUN + " & done; wait\n",
    "a command in a variable": HEAD + f'CMD="{TORCHRUN}"\nsrun bash -c "$CMD"\n',
    "a function for the tasks": HEAD
    + f"work() {{\n  {TORCHRUN} --node_rank $SLURM_NODEID\n}}\nexport -f work\nsrun bash -c work\n",
    "the whole nodelist": HEAD + "echo ${SLURM_JOB_NODELIST:-none}\nsrun -w $SLURM_JOB_NODELIST hostname\n",
    "nodes joined by commas": HEAD + f'srun -w "$(IFS=,; echo "${{NODES[*]:0:2}}")" {TORCHRUN}\n',
    "directives that are off": HEAD + "##SBATCH --nodes=$N\n# SBATCH --nodes=$N\nhostname\n##SBATCH -N 4\n",
    "patterns in file names": HEAD + "#SBATCH --output=logs/%x-%j.out  # one a job\nhostname\n",
    "a launcher in text": HEAD + 'echo "use torchrun or deepspeed"\nwhich deepspeed\nsrun hostname\n',
    "a script for another job": HEAD
    + "cat > next.sh <<'EOF'\n#!/bin/bash\n#SBATCH --nodes=$N\nEOF\nhostname\n",
    "the signal of the steps": "#!/bin/bash\n#SBATCH --signal=USR1@120\nsrun deepspeed t.py\n",
    "PBS": "#!/bin/bash\n#PBS -l select=2:ngpus=8:mpiprocs=1\n#PBS -l place=scatter:exclhost\n"
    + "cd $PBS_O_WORKDIR\nsort -u $PBS_NODEFILE | sed 's/$/ slots=8/' > hosts-$PBS_JOBID\n"
    + "deepspeed --hostfile hosts-$PBS_JOBID t.py\n",
    "PBS, Torque": "#PBS -l nodes=2:ppn=8 -d /work\nmpiexec -n 2 --ppn 1 torchrun t.py\n",
    "LSF": '#BSUB -n 16\n#BSUB -R "span[ptile=8]"\nhostname\n#BSUB -W 60\nblaunch -z "$H" torchrun t.py\n',
    "SGE": "#$ -cwd -pe mpi 16\n# $HOME\ndeepspeed t.py\n",
    "Flux": "#!/bin/bash\n# flux: -N 2\nflux run -N2 -n2 -o exit-on-error torchrun t.py\n",
    "srun in several forms": EIGHT
    + "srun -N 2 -n 2 -c 8 -l -- torchrun t.py\nsrun -n2 --label torchrun t.py\n",
}


@pytest.mark.parametrize("text", RIGHT.values(), ids=list(RIGHT))
def test_a_right_script_has_nothing_wrong(text: str) -> None:
    assert codes(text) == []


def test_advice() -> None:
    text = HEAD + "#SBATCH --cpus-per-task=8\n#SBATCH --time=1:0:0\nexport MASTER_PORT=29500\n"
    text += "cat > ds_config.json <<EOF\n{}\nEOF\n" + f"srun {TORCHRUN}\n"
    assert codes(text, info=True) == [
        "no-signal",
        "fixed-port",
        "shared-path",
        "cpus-not-passed",
        "hang-on-failure",
    ]
    assert codes(text) == []
    better = text.replace("29500", "$((20000 + SLURM_JOB_ID % 20000))").replace("> ds", "> $SLURM_JOB_ID-ds")
    better = better.replace("srun ", "srun -c 8 -K1 ").replace(
        "#SBATCH --time", "#SBATCH --signal=USR1@60 --time"
    )
    assert codes(better, info=True) == []


def test_a_fixed_port_on_nodes_of_its_own() -> None:
    text = HEAD + "#SBATCH --exclusive\nexport MASTER_PORT=29500\n"
    assert codes(text, info=True) == []


def test_a_script_without_directives() -> None:
    checked = check_file("run.sh", b"#!/bin/bash\nsrun torchrun --node_rank $SLURM_NODEID\n", Target())
    assert (checked.kind, [f.code for f in checked.findings]) == ("batch-script", ["not-checked"])


def test_a_file_is_checked_as_a_script() -> None:
    checked = check_file("job.sbatch", (HEAD + TORCHRUN + "\n").encode(), Target())
    assert (checked.kind, [f.code for f in checked.findings]) == ("batch-script", ["first-node-only"])
    assert checked.readable


@pytest.mark.parametrize(
    "end", ["'", '"', "$(", "<<EOF", "\\", "`", "(", "{", "|", "&", "\x00", "<<<", "$", "<<'"]
)
def test_a_script_that_breaks_off(end: str) -> None:
    """Whatever does not close, the rest is read and nothing raises."""
    for text in (HEAD + end, HEAD + end + "\nsrun torchrun t.py\n", HEAD + f"srun bash -c {end}\n"):
        assert all(finding.message for finding in check_batch_script(text, Target()))


class TestWrittenConfigs:
    def test_a_config_is_checked_at_its_lines(self) -> None:
        text = HEAD + "cat > $SLURM_JOB_ID.json <<'EOF'\n{\n\"train_micro_batch_size_per_gpu\": 1,\n"
        text += '"gradient_clipping": 1.0, "zero_optimisation": {"stage": 2}\n}\nEOF\nsrun hostname\n'
        finding = the("unknown-key", text)
        assert (finding.severity, finding.key, finding.line) == ("error", "zero_optimisation", 8)

    def test_variables_have_the_values_of_the_script(self) -> None:
        text = HEAD + 'ZERO=4\ncat > $J.json <<EOF\n{"train_batch_size": $BATCH,\n'
        text += (
            '"gradient_clipping": -1, "steps_per_print": $N,\n"zero_optimization": {"stage": ${ZERO}}}\nEOF\n'
        )
        findings = check_batch_script(text, Target(world_size=8))
        assert [(f.code, f.key, f.line) for f in findings] == [("range", "zero_optimization.stage", 9)]

    @pytest.mark.parametrize("body", ["hello {}", '{"a": 1}', "{", "{$X", "{}", "[1]", ""])
    def test_other_documents(self, body: str) -> None:
        assert codes(HEAD + f"cat > $J.txt <<EOF\n{body}\nEOF\n") == []

    def test_a_config_that_cannot_be_read(self) -> None:
        assert codes(HEAD + 'cat > $J.json <<EOF\n{"zero_optimization": {\nEOF\n') == ["syntax"]

    def test_a_quoted_document_keeps_its_variables(self) -> None:
        text = HEAD + 'BATCH=8\ncat > $J.json <<\'EOF\'\n{"train_batch_size": "$BATCH"}\nEOF\n'
        assert codes(text) == ["placeholder"]
