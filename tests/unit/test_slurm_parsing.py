"""Slurm's text as seen in the wild, and what we make of it. No Slurm is needed here."""
import dataclasses
import subprocess
import sys

import pytest

from jobs.spec.load import SpecError
from orchestrator.submission import SlurmRequest, SubmissionError, client, nodes
from orchestrator.submission.client import explain_refusal, run_sbatch, submission_environment
from orchestrator.submission.executor import OrcExecutor
from orchestrator.submission.jobstate import STATES, parse_state, parse_states
from orchestrator.submission.launch import agent_step, cpus_per_node, parse_end_time, step_environment
from orchestrator.submission.nodes import natural, order_by_switch, switch_paths
from orchestrator.submission.script import leaked_secrets, sbatch_script

STATE_TEXTS = [
    ("COMPLETED", "completed"), ("RUNNING", "running"), ("PENDING", "pending"), ("FAILED", "failed"),
    ("CANCELLED", "cancelled"), ("CANCELLED by 54321", "cancelled"), ("CANCELLED by 0", "cancelled"),
    ("TIMEOUT", "time_limit"), ("DEADLINE", "time_limit"), ("OUT_OF_MEMORY", "failed"),
    ("NODE_FAIL", "node_failure"), ("BOOT_FAIL", "node_failure"), ("PREEMPTED", "preempted"),
    ("RESIZING", "running"), ("SUSPENDED", "running"), ("COMPLETING", "running"), ("REQUEUED", "pending"),
    ("REQUEUE_HOLD", "pending"), ("CONFIGURING", "pending"), ("SPECIAL_EXIT", "pending"),
    ("", "unknown"), ("   ", "unknown"), ("REVOKED", "unknown"), ("NEW_IN_SLURM_99", "unknown"),
    ("CANCELLED+", "unknown"), ("COMPLETE", "unknown"), ("None", "unknown"), ("running", "running"),
]
ROWS = [
    # output of sacct or squeue                                          wanted   state (None: not spoken of)
    ("", "5", None),
    ("JobID|State", "5", None),
    ("5|RUNNING", "5", "running"),
    ("5|RUNNING\n5.batch|CANCELLED\n5.0|FAILED", "5", "running"),
    ("5.batch|FAILED", "5", None),
    ("55|FAILED\n5|PENDING", "5", "pending"),
    ("2699101|TIMEOUT\n2699102|OUT_OF_MEMORY\n2699103|NODE_FAIL", "2699103", "node_failure"),
    ("7_1|COMPLETED\n7_2|RUNNING", "7", None),  # an array, which is never submitted
    ("9|SOMETHING_NEW", "9", "unknown"),
    ("8|RESIZING\n8|RUNNING", "8", "running"),  # one node lost: a row for each size of the job
    ("8|RESIZING\n8|CANCELLED by 0", "8", "cancelled"),
    ("8|RESIZING\n8|RESIZING\n8|COMPLETED", "8", "completed"),
    ("8|REQUEUED\n8|PREEMPTED\n8|PENDING", "8", "pending"),  # as with --duplicates
    ("slurmdbd: some warning\n9|COMPLETED", "9", "completed"),
]
CPUS = [
    ({"SLURM_CPUS_PER_TASK": "12", "SLURM_JOB_CPUS_PER_NODE": "96(x4)"}, 12),
    ({"SLURM_JOB_CPUS_PER_NODE": "96(x4)"}, 96),
    ({"SLURM_JOB_CPUS_PER_NODE": "72(x2),36"}, 36),
    ({"SLURM_JOB_CPUS_PER_NODE": "8"}, 8),
    ({"SLURM_JOB_CPUS_PER_NODE": "16,112(x15)"}, 16),
]
END_TIMES = [
    ("JobId=7 StartTime=100 EndTime=400 Deadline=N/A PreemptEligibleTime=50 PreemptTime=None", 400.0),
    ("JobId=7 StartTime=100 EndTime=400 PreemptEligibleTime=50 PreemptTime=250", 250.0),
    ("JobId=7 StartTime=100 EndTime=Unknown", None),
    ("", None),
]
TREE = """SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=gpu3,gpu10
SwitchName=leaf10 Level=0 LinkSpeed=1 Nodes=gpu1,gpu4
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=gpu2
SwitchName=spine1 Level=1 LinkSpeed=1 Nodes=gpu1,gpu4,gpu2 Switches=leaf10,leaf3
SwitchName=spine2 Level=1 LinkSpeed=1 Nodes=gpu3,gpu10 Switches=leaf2
"""
BLOCKS = """BlockName=b2 BlockIndex=1 Nodes=gpu1,gpu3 BlockSize=2
BlockName=b1 BlockIndex=0 Nodes=gpu10,gpu2 BlockSize=2
"""
ORDERS = [
    (TREE, ("gpu2", "gpu1", "gpu4", "gpu3", "gpu10")),
    (BLOCKS, ("gpu4", "gpu2", "gpu10", "gpu1", "gpu3")),  # gpu4 is in no block
    ("No topology information available\n", ("gpu1", "gpu2", "gpu3", "gpu4", "gpu10")),
    ("", ("gpu1", "gpu2", "gpu3", "gpu4", "gpu10")),
]
REQUEST = SlurmRequest(job_name="run-1", num_nodes=4, gres="gpu:8", cpus_per_node=96, mem_gb=900, time_min=120,
                       partition="h100", account="lab", qos="high", exclude=("bad1", "bad2"), signal_lead_s=180,
                       setup=("module load cuda",), extra={"mail_type": "END", "exclusive": True, "nice": 100,
                                                          "contiguous": False, "wckey": None})
SCRIPT_LINES = [
    "#SBATCH --job-name=run-1", "#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=1", "#SBATCH --cpus-per-task=96",
    "#SBATCH --mem=900G", "#SBATCH --gres=gpu:8", "#SBATCH --time=120", "#SBATCH --partition=h100",
    "#SBATCH --account=lab", "#SBATCH --qos=high", "#SBATCH --exclude=bad1,bad2", "#SBATCH --signal=B:USR2@180",
    "#SBATCH --no-kill", "#SBATCH --no-requeue", "#SBATCH --output=/runs/%j.out", "#SBATCH --open-mode=append",
    "#SBATCH --mail-type=END", "#SBATCH --exclusive", "#SBATCH --nice=100",
]
BAD_REQUESTS = [
    # change                                          what the message must hold
    ({"num_nodes": 0}, ["cluster.num_nodes: 0", "at least 1"]),
    ({"signal_lead_s": 7200}, ["signal_lead_s: 7200", "between 1 and 7140", "time_min=120"]),
    ({"signal_lead_s": 0}, ["signal_lead_s: 0"]),
    ({"job_name": "a\n#SBATCH --uid=0"}, ["run", "single line"]),
    ({"exclude": ("ok", "n1\nrm")}, ["exclude[1]", "single line"]),
    ({"extra": {"nodes": 3}}, ["extra.nodes: 3", "set cluster.num_nodes instead"]),
    ({"extra": {"signal": "B:TERM@5"}}, ["extra.signal", "cluster.slurm.signal_lead_s"]),
    ({"extra": {"ntasks": 8}}, ["extra.ntasks: 8", "cannot be changed"]),
    ({"extra": {"no_kill": False}}, ["extra.no_kill", "cannot be changed"]),
    ({"extra": {"a=b c": 1}}, ["extra.a=b c", "not a long option"]),
    ({"extra": {"licenses": ["x"]}}, ["extra.licenses", "must be text, a number or true"]),
]
SECRETS = [
    ({"WANDB_API_KEY": "0123456789abcdef"}, "export WANDB_API_KEY=0123456789abcdef", ["WANDB_API_KEY"]),
    ({"HF_TOKEN": "hf_abcdefgh"}, "curl -H hf_abcdefgh", ["HF_TOKEN"]),
    ({"HF_TOKEN": "hf_abcdefgh"}, "nothing", []),
    ({"SHORT_TOKEN": "1"}, "--nodes=1", []),
    ({"MONKEY": "0123456789"}, "0123456789", []),
    ({"GIT_SECRET": "/home/me/.secret"}, "/home/me/.secret", []),
]


@pytest.mark.parametrize("text, state", STATE_TEXTS)
def test_every_state_has_one_meaning_and_new_ones_are_unknown(text, state):
    assert parse_state(text) == state


def test_every_state_that_installed_slurm_documents_is_listed():
    known = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "CONFIGURING", "COMPLETING", "DEADLINE", "FAILED", "NODE_FAIL",
             "OUT_OF_MEMORY", "PENDING", "PREEMPTED", "RUNNING", "RESV_DEL_HOLD", "REQUEUE_FED", "REQUEUE_HOLD",
             "REQUEUED", "RESIZING", "REVOKED", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "SUSPENDED",
             "TIMEOUT"}  # squeue(1), "JOB STATE CODES", 22.05 to 25.05
    assert known <= set(STATES)


@pytest.mark.parametrize("text, wanted, state", ROWS)
def test_rows_speak_of_the_job_asked_for_only(text, wanted, state):
    assert parse_states(text, job_ids=[wanted]).get(wanted) == state


@pytest.mark.parametrize("env, expected", CPUS)
def test_cpus_per_node_is_what_every_node_has(env, expected):
    assert cpus_per_node(env) == expected


@pytest.mark.parametrize("job, expected", END_TIMES)
def test_end_time_is_the_earlier_of_limit_and_preemption(job, expected):
    assert parse_end_time(job) == expected


@pytest.mark.parametrize("topology, expected", ORDERS)
def test_nodes_are_ordered_by_switch_then_by_number(topology, expected, monkeypatch):
    monkeypatch.setattr(nodes, "ask", lambda *argv: topology if "topology" in argv else argv[-1].replace(",", "\n"))
    assert order_by_switch(("gpu10", "gpu1", "gpu3", "gpu2", "gpu4")) == expected


def test_switch_paths_go_from_the_spine_to_the_leaf(monkeypatch):
    monkeypatch.setattr(nodes, "ask", lambda *argv: argv[-1].replace(",", "\n"))
    assert switch_paths(TREE)["gpu4"] == ("spine1", "leaf10")


def test_numbers_in_names_sort_as_numbers():
    assert sorted(["n10", "n2", "a1b3", "a1b20", "login", "3"], key=natural) == [
        "3", "a1b3", "a1b20", "login", "n2", "n10"]
    assert sorted(["n²", "n٣", "n2"], key=natural) == ["n2", "n٣", "n²"]  # no numbers, and others' digits


def test_script_asks_for_everything_and_nothing_twice():
    lines = sbatch_script(REQUEST, command="python -m x", output="/runs/%j.out").splitlines()
    assert [line for line in lines if line.startswith("#SBATCH")] == SCRIPT_LINES
    assert lines[0] == "#!/bin/bash" and lines[-1] == "exec python -m x"
    assert lines.index("trap '' USR2") < lines.index("module load cuda") < len(lines) - 1


def test_requeue_replaces_no_requeue():
    script = sbatch_script(dataclasses.replace(REQUEST, extra={"requeue": True}), command="x", output="/o")
    assert "#SBATCH --requeue\n" in script and "--no-requeue" not in script


def test_unset_fields_leave_no_trace():
    bare = SlurmRequest(job_name="a", num_nodes=1, gres=None, cpus_per_node=None, mem_gb=None, time_min=5,
                        partition=None, account=None, qos=None, exclude=(), signal_lead_s=60, setup=())
    script = sbatch_script(bare, command="x", output="/o")
    assert not any(flag in script for flag in ("gres", "cpus", "mem", "partition", "account", "qos", "exclude", "ERR"))


@pytest.mark.parametrize("changes, words", BAD_REQUESTS, ids=lambda value: str(value)[:40])
def test_a_bad_request_names_value_place_and_remedy(changes, words):
    with pytest.raises(SpecError) as error:
        sbatch_script(dataclasses.replace(REQUEST, **changes), command="x", output="/o")
    assert all(word in str(error.value) for word in words), error.value


def test_all_problems_of_a_request_come_at_once():
    bad = dataclasses.replace(REQUEST, num_nodes=0, signal_lead_s=0, extra={"nodes": 1})
    with pytest.raises(SpecError) as error:
        sbatch_script(bad, command="x", output="/o/100%/x")
    assert len(error.value.problems) == 4


@pytest.mark.parametrize("env, script, expected", SECRETS)
def test_values_of_secrets_are_found_in_the_script(env, script, expected):
    assert leaked_secrets(script, env) == expected


def test_submission_drops_the_outer_job_but_keeps_the_client_settings():
    env = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_MEM_PER_CPU": "1", "SLURM_JOB_ID": "3", "SBATCH_ACCOUNT": "me",
           "SUBMITIT_EXECUTOR": "slurm", "PMIX_RANK": "0", "HOME": "/root", "WANDB_API_KEY": "k"}
    assert submission_environment(env) == {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "me", "HOME": "/root",
                                           "WANDB_API_KEY": "k"}


def test_a_step_keeps_the_job_but_not_what_contradicts_its_own_flags():
    env = {"SLURM_JOB_ID": "3", "SLURM_MEM_PER_CPU": "100", "SLURM_TRES_PER_TASK": "cpu=1", "SLURM_NNODES": "4"}
    assert step_environment(env) == {"SLURM_JOB_ID": "3"}


def test_agents_start_one_per_node_on_the_nodes_named(tmp_path):
    step = agent_step(("n3", "n1"), cpus_per_node=7, run_dir=tmp_path / "a@b c")
    assert step[-2:] == [f"{tmp_path}/a@b c/logs/agent-", ".log"]
    for flag in ("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--overlap", "--ntasks-per-node=1", "--ntasks=2",
                 "--nodes=2", "--nodelist=n3,n1", "--mpi=none", "--cpu-bind=none", "--cpus-per-task=7"):
        assert flag in step


@pytest.mark.parametrize("stderr, words", [
    ("sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid partition "
     "name specified\n", ["invalid partition specified: x", "cluster.slurm.partition"]),
    ("sbatch: error: Batch job submission failed: Requested node configuration is not available\n",
     ["ask for no more nodes"]),
    ("sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)\n",
     ["cluster.slurm.time_min"]),
    ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n",
     ["scontrol ping"]),
    ("sbatch: error: something the site invented\n", ["Slurm refused the job: something the site invented"]),
])
def test_a_refusal_keeps_slurms_words_and_adds_a_remedy(stderr, words, monkeypatch):
    monkeypatch.setattr(client, "ask", lambda *argv, **_: None)
    assert all(word in explain_refusal(stderr) for word in words)


def test_parameters_of_the_plugin_are_checked_and_a_refusal_changes_nothing(tmp_path):
    executor = OrcExecutor(tmp_path / "jobs")
    executor.update_parameters(time_min=30, partition="a")
    with pytest.raises(ValueError, match="partitoin: unknown parameter; did you mean 'partition'"):
        executor.update_parameters(partitoin="b")
    for wrong in ({"time_min": "long"}, {"exclude": "n1"}, {"signal_lead_s": 1800}):
        with pytest.raises(SpecError):
            executor.update_parameters(**wrong)
    assert executor.request.time_min == 30 and executor.request.partition == "a"
    assert not (tmp_path / "jobs").exists()


def test_submitit_finds_the_plugin_and_its_own_choice_stays_slurm():
    code = ("import submitit, tempfile; e = submitit.AutoExecutor(folder=tempfile.gettempdir(), cluster='orc');"
            "e.update_parameters(nodes=3, gpus_per_node=8, mem_gb=4.0, timeout_min=9, orc_qos='q');"
            "r = e._executor.request; print(r.num_nodes, r.gres, r.mem_gb, r.time_min, r.qos);"
            "from submitit.core.plugins import get_job_environments; print(get_job_environments()['orc'].name());"
            "print(submitit.AutoExecutor.which() != 'orc')")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.stdout.split("\n")[:3] == ["3 gpu:8 4 9 q", "orc", "True"], done.stderr


def test_sbatch_that_is_missing_is_reported_as_such(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmissionError, match="no sbatch on PATH"):
        run_sbatch(tmp_path / "job.sh")


@pytest.mark.parametrize("printed, job_id", [("123\n", "123"), ("note of the site\n123;alpha\n", "123"),
                                             ("Submitted\n", None), ("", None)])
def test_job_id_is_the_last_line_that_sbatch_prints(tmp_path, monkeypatch, printed, job_id):
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nprintf '{printed!s}'\n".replace("\n'", "\\n'", 1))
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if job_id is None:
        with pytest.raises(SubmissionError, match="instead of a job id"):
            run_sbatch(tmp_path / "job.sh")
    else:
        assert run_sbatch(tmp_path / "job.sh") == job_id


def test_a_command_that_fails_hangs_or_is_missing_is_no_answer(tmp_path):
    assert client.ask("sh", "-c", "echo out; exit 3") is None
    assert client.ask("sleep", "30", timeout_s=0.1) is None
    assert client.ask("no-such-command-of-slurm") is None
    assert client.ask("sh", "-c", "echo $SLURM_TIME_FORMAT") == "%s\n"
