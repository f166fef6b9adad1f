"""Files for clusters that are not here: what they would start is caught, and what they say checked.

The fields are those of Slurm 23, `sky/utils/schemas.py` of SkyPilot, and `trainjob_types.go` of
Kubeflow Trainer 2.2; whether a cluster takes them, no test here can say.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from test_doc_commands import refusal

DEPLOY = Path(__file__).parents[1] / "deploy"
TRAIN_JOB: dict[str, Any] = {
    "apiVersion!": "trainer.kubeflow.org/v1alpha1",
    "kind!": "TrainJob",
    "metadata!": {"name!": str, "namespace": str, "labels": {str: str}},
    "spec!": {
        "runtimeRef!": {"name!": str, "kind": str, "apiGroup": str},
        "trainer": {
            "image": str,
            "numNodes": int,
            "numProcPerNode": int,
            "resourcesPerNode": {"limits": {str: str}, "requests": {str: str}},
            "env": [{"name!": str, "value!": str}],
            "command": [str],
            "args": [str],
        },
        "runtimePatches": [
            {"manager!": str, "trainingRuntimeSpec": {"template": {"spec": "JobSet"}}}
        ],
        "suspend": bool,
        "activeDeadlineSeconds": int,
    },
}
POD: dict[str, Any] = {
    "containers": [{"name!": str, "volumeMounts": [{"name!": str, "mountPath!": str}]}],
    "volumes": [{"name!": str, "persistentVolumeClaim!": {"claimName!": str}}],
    "nodeSelector": {str: str},
}
JOB = {"name!": str, "template": {"spec": {"template": {"spec": POD}}}}
TRAIN_JOB["spec!"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"] = {
    "replicatedJobs": [JOB]
}
TASK = {
    "name": str,
    "workdir": str,
    "num_nodes": int,
    "resources": {
        "infra": str,
        "accelerators": str,
        "use_spot": bool,
        "job_recovery": {"strategy": str, "max_restarts_on_errors": int},
    },
    "envs": {str: str},
    "file_mounts": {str: str},
    "volumes": {str: str},
    "setup": str,
    "run": str,
}
VOLUME = {
    "name!": str,
    "type!": "k8s-pvc",
    "infra": str,
    "size": str,
    "config": {"access_mode": str, "storage_class_name": str, "namespace": str},
}


def misfits(value: Any, form: Any, place: str = "") -> list[str]:
    """Where a document has a field its form does not know, lacks one (`!`), or mistakes a type."""
    if isinstance(form, str):
        return [] if value == form else [f"{place}: {value} is not {form}"]
    if isinstance(form, type):
        return [] if type(value) is form else [f"{place}: {value!r} is no {form.__name__}"]
    if type(value) is not type(form):
        return [f"{place}: {value!r} is no {type(form).__name__}"]
    if isinstance(form, list):
        return [one for item in value for one in misfits(item, form[0], f"{place}[]")]
    if str in form:
        return [one for key in value for one in misfits(value[key], form[str], f"{place}.{key}")]
    known = {name.rstrip("!"): part for name, part in form.items()}
    found = [f"{place}.{key}: unknown" for key in value.keys() - known.keys()]
    found += [
        f"{place}.{key[:-1]}: missing" for key in form if key[-1] == "!" and key[:-1] not in value
    ]
    for key in value.keys() & known.keys():
        found += misfits(value[key], known[key], f"{place}.{key}")
    return found


def document(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "form"),
    [("kubeflow.yaml", TRAIN_JOB), ("skypilot.yaml", TASK), ("skypilot-volume.yaml", VOLUME)],
)
def test_a_document_has_the_fields_of_its_form(name: str, form: Any) -> None:
    assert misfits(document(name), form) == []


def test_a_document_with_a_wrong_field_is_found() -> None:
    wrong = {"kind": "Job", "metadata": {}, "spec": {"trainer": {"numNodes": "2", "nodes": 2}}}
    assert sorted(misfits(wrong, TRAIN_JOB)) == [
        ".apiVersion: missing",
        ".kind: Job is not TrainJob",
        ".metadata.name: missing",
        ".spec.runtimeRef: missing",
        ".spec.trainer.nodes: unknown",
        ".spec.trainer.numNodes: '2' is no int",
    ]


def test_names_that_belong_together_are_the_same() -> None:
    assert document("skypilot-volume.yaml")["name"] in document("skypilot.yaml")["volumes"].values()
    job = document("kubeflow.yaml")["spec"]
    node = job["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    pod = node["template"]["spec"]["template"]["spec"]
    mounts = pod["containers"][0]["volumeMounts"]
    assert [one["name"] for one in mounts] == [one["name"] for one in pod["volumes"]]
    out = job["trainer"]["args"][job["trainer"]["args"].index("--out") + 1]
    assert out.startswith(mounts[0]["mountPath"])


# --- what would run -----------------------------------------------------------------------------


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def shell(script: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Bash in `folder`, whose `bin` stands for the cluster."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", *script],
        cwd=folder,
        env={"PATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )


def submit(folder: Path, happens: str, *flags: str) -> tuple[int, list[str], str]:
    """The exit code of the Slurm script, the step it started and what else it asked of Slurm."""
    program(folder / "bin" / "srun", f'printf "%s\\n" "$@" > step\n{happens}')
    program(
        folder / "bin" / "scontrol",
        'echo "$@" >> asked\n[ "$1" = show ] && printf "node7\\nnode9\\n"',
    )
    job = {"SLURM_JOB_ID": "12", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7,9]"}
    more = {"SLURM_GPUS_ON_NODE": "4", "OUT": str(folder / "run")}
    (folder / "run").mkdir(exist_ok=True)
    done = shell([str(DEPLOY / "slurm.sbatch"), *flags], folder, **job, **more)
    assert done.stderr == ""
    asked = (folder / "asked").read_text()
    return done.returncode, (folder / "step").read_text().splitlines(), asked


def of_slurm(folder: Path) -> list[str]:
    _, step, _ = submit(folder, "touch run/DONE", "--steps", "5")
    assert step[: step.index("torchrun")] == ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
    return step[step.index("torchrun") :]


def of_skypilot(folder: Path) -> list[str]:
    torchrun = folder / ".venv" / "bin" / "torchrun"
    program(torchrun, f'printf "%s\\n" torchrun "$@" > {folder / "step"}')
    variables = {"NODE_IPS": "10.0.0.7\n10.0.0.9", "NUM_NODES": "2", "NODE_RANK": "1"}
    told = {f"SKYPILOT_{name}": value for name, value in variables.items()}
    task = document("skypilot.yaml")
    done = shell(["-c", task["run"]], folder, **told, SKYPILOT_NUM_GPUS_PER_NODE="8")
    assert (done.returncode, done.stderr) == (0, "")
    return (folder / "step").read_text().splitlines()


def of_kubeflow(folder: Path) -> list[str]:
    trainer = document("kubeflow.yaml")["spec"]["trainer"]
    return [*trainer["command"], *trainer["args"]]


@pytest.mark.parametrize("started", [of_slurm, of_skypilot, of_kubeflow])
def test_torchrun_and_train_understand_what_is_started(
    started: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = started(tmp_path)
    assert words[0] == "torchrun"
    read = get_args_parser().parse_args(words[1:])
    assert (read.module, read.training_script) == (True, "rookworld")
    command = read.training_script_args
    assert "--resume" in command
    assert refusal(command, monkeypatch, capsys) == ""
    if started is of_slurm:
        assert (read.nnodes, read.nproc_per_node, read.max_restarts) == ("1:2", "4", 3)
        assert (read.rdzv_endpoint, read.rdzv_id) == ("node7:29500", "12-0")
        assert command[-2:] == ["--steps", "5"]
    if started is of_skypilot:
        assert (read.nnodes, read.node_rank, read.master_addr) == ("2", 1, "10.0.0.7")


@pytest.mark.parametrize(
    ("happens", "code", "again"),
    [
        ("touch run/DONE", 0, False),
        ("echo {} >> run/metrics.jsonl; exit 1", 1, True),
        ("exit 1", 1, False),
    ],
    ids=["done", "cut short", "no step made"],
)
def test_a_slurm_job_is_requeued_while_it_gets_on(
    happens: str, code: int, again: bool, tmp_path: Path
) -> None:
    found, _, asked = submit(tmp_path, happens)
    assert found == code
    assert ("requeue 12" in asked) == again


def test_slurm_reads_the_options_above_the_first_command() -> None:
    text = (DEPLOY / "slurm.sbatch").read_text(encoding="utf-8")
    head, _, body = text.partition("\nset -euo pipefail")
    assert "#SBATCH" not in body
    assert all(line.startswith("#") for line in head.splitlines())
    options = re.findall(r"^#SBATCH --([a-z-]+)(?:=\S+)?$", head, re.MULTILINE)
    assert len(options) == head.count("#SBATCH")
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "signal", "requeue"} <= set(options)


def test_every_script_is_sound_bash(tmp_path: Path) -> None:
    task = document("skypilot.yaml")
    scripts = {
        "sbatch": (DEPLOY / "slurm.sbatch").read_text(),
        **{k: task[k] for k in ("setup", "run")},
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        assert shell(["-n", name], tmp_path).stderr == ""
