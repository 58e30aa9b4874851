"""The files of configs/cluster: what they start is what torchrun, srun, Lightning and lit-llm understand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from lit_llm.cli.main import main
from tests.distributed import ROOT, _free_port

CLUSTER = ROOT / "configs" / "cluster"


def program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(0o755)


def called(script: str, instead_of: str, tmp_path: Path, *words: str, **environment: str) -> tuple[list[str], str]:
    """What a script would start, and one variable that it sets for it."""
    program(
        tmp_path / "bin",
        instead_of,
        "import json, os, sys\n"
        'print(json.dumps([sys.argv[1:], os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "")]))\n',
    )
    done = subprocess.run(
        ["bash", str(CLUSTER / script), *words],
        env={**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    words_seen, variable = json.loads(done.stdout)
    return words_seen, variable


def torchrun_and_ours(words: list[str]) -> tuple[Any, list[str]]:
    """torchrun's options, and the words behind `-m lit_llm`."""
    parsed = get_args_parser().parse_args(words)
    assert parsed.module
    assert parsed.training_script == "lit_llm"
    return parsed, parsed.training_script_args


def resolved(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--print_config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_torchrun(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words, variable = called("torchrun.sh", "torchrun", tmp_path, "--trainer.max_steps", "3")
    options, ours = torchrun_and_ours(words)
    assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("1", "gpu", 3)
    assert options.rdzv_endpoint == "localhost:0"
    assert variable == "1"
    config = resolved(ours, capsys)
    assert config["trainer"]["max_steps"] == 3
    assert config["ckpt_path"] == "last"
    environment = {"NODES": "2:4", "NPROC": "8", "HEAD": "node1:29400", "JOB": "j", "RESTARTS": "9"}
    options, _ = torchrun_and_ours(called("torchrun.sh", "torchrun", tmp_path, **environment)[0])
    assert [options.nnodes, options.nproc_per_node, options.max_restarts] == ["2:4", "8", 9]
    assert [options.rdzv_endpoint, options.rdzv_id, options.rdzv_backend] == ["node1:29400", "j", "c10d"]
    documented = set(re.findall(r"^#   ([A-Z]+)  ", (CLUSTER / "torchrun.sh").read_text(), re.M))
    assert documented == set(environment)


def test_kubernetes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    assert service["spec"]["clusterIP"] == "None"
    name, spec = job["metadata"]["name"], job["spec"]
    assert spec["completions"] == spec["parallelism"]
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    (container,) = spec["template"]["spec"]["containers"]
    program, *words = container["command"]
    assert program == "torchrun"
    options, ours = torchrun_and_ours(words)
    assert options.nnodes == str(spec["completions"])
    assert options.nproc_per_node == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert options.rdzv_endpoint == f"{name}-0.{service['metadata']['name']}:{container['ports'][0]['containerPort']}"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    (tmp_path / "run.yaml").write_text("trainer: {max_steps: 3}")
    assert resolved(ours, capsys)["ckpt_path"] == "last"
    (plugin,) = re.findall(r"--trainer\.plugins (\S+)`", (CLUSTER / "kubernetes.yaml").read_text())
    config = resolved([*ours, f"--trainer.plugins={plugin}"], capsys)
    assert config["trainer"]["plugins"]["class_path"].endswith("KubeflowEnvironment")


def test_slurm(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    layout = {"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "8"}
    words, _ = called("slurm.sbatch", "srun", tmp_path, "--trainer.max_steps", "3", **layout)
    assert words[:3] == ["--wait=120", "lit-llm", "fit"]
    trainer = resolved(words[2:], capsys)["trainer"]
    assert (trainer["num_nodes"], str(trainer["devices"]), trainer["max_steps"]) == (2, "8", 3)
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", (CLUSTER / "slurm.sbatch").read_text(), re.M))
    assert asked["signal"] == "USR1@120"
    assert asked["job-name"] not in ("bash", "interactive"), "Lightning would not see SLURM"
    assert asked["gres"] == f"gpu:{asked['ntasks-per-node']}"
    assert "requeue" in asked


@pytest.mark.parametrize(
    ("codes", "starts", "code"), [("1 1 0", 3, 0), ("2", 1, 2), ("137 134 0", 3, 0), ("143", 1, 143), ("1 " * 9, 4, 1)]
)
def test_slurm_starts_a_failed_run_again(tmp_path: Path, codes: str, starts: int, code: int) -> None:
    log = tmp_path / "starts"
    body = f"""
import sys
from pathlib import Path
log = Path({str(log)!r})
done = log.read_text() if log.exists() else ""
log.write_text(done + "x")
sys.exit(int({codes.split()!r}[len(done)]))
"""
    program(tmp_path / "bin", "srun", body)
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "1"}
    done = subprocess.run(["bash", str(CLUSTER / "slurm.sbatch")], env={**os.environ, **environment}, check=False)
    assert done.returncode == code
    assert len(log.read_text()) == starts


@pytest.mark.slow
def test_slurm_runs_two_tasks_on_two_machines(store: str, tmp_path: Path) -> None:
    """An srun that starts one task a machine with the variables that the real one sets."""
    body = f"""
import os, subprocess, sys
command = [{sys.executable!r}, "-m", "lit_llm", *sys.argv[3:]]
layout = {{"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "lit-llm", "SLURM_LOCALID": "0"}}
def variables(task):
    return {{**os.environ, **layout, "SLURM_PROCID": str(task), "SLURM_NODEID": str(task)}}
tasks = [subprocess.Popen(command, env=variables(task)) for task in (0, 1)]
sys.exit(max(task.wait() for task in tasks))
"""
    program(tmp_path / "bin", "srun", body)
    environment = {"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment |= {"MASTER_PORT": str(_free_port()), "CUDA_VISIBLE_DEVICES": ""}
    words = f"--data.store {store} --data.seq_len 16 --data.global_batch_size 8 --trainer.max_steps 3"
    words += " --trainer.accelerator cpu --trainer.strategy ddp --trainer.limit_val_batches 0 --model.config 1m"
    words += f" --trainer.default_root_dir {tmp_path}/run"
    done = subprocess.run(
        ["bash", str(CLUSTER / "slurm.sbatch"), *words.split()],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-3.ckpt").exists()
