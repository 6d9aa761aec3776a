"""load: what is accepted, and that every refusal names value, origin and remedy, all at once."""
from pathlib import Path

import pytest

from jobs.spec.load import SpecError
from orchestrator.config import to_yaml
from orchestrator.load import load, read_stored

MODEL = "name: tiny\nvocab_size: 256\ndim: 64\nnum_layers: 4\nnum_heads: 4\nnum_kv_heads: 4\nffn_dim: 128\n"
CLUSTER = "name: desk\nkind: local\nnum_nodes: 2\ngpus_per_node: 4\ngpu: cpu\n"
RUN = """run: try
model: tiny
cluster: desk
training: {steps: 10, seq_len: 8, global_batch_size: 4}
data: {path: "${python_stdlib:}"}
"""

# name of the case, text appended to the run, overrides, what every line of the message must hold
REFUSALS = [
    ("unknown section", "trainin: {steps: 1}\n", [], ["trainin: unknown key; did you mean 'training'? (run.yaml:6)"]),
    ("unknown leaf", "", ["training.stepss=3"], ["training.stepss: unknown key; did you mean 'steps'? (command line)"]),
    ("name of another section", "tp: 2\n", [], ["tp: unknown key; did you mean 'parallel.tp'? (run.yaml:6)"]),
    ("wrong type", "", ["training.steps=many"], ["training.steps: 'many'", "could not be converted to Integer"]),
    ("wrong choice", "", ["parallel.schedule=zigzag"], ["parallel.schedule: 'zigzag'", "1f1b"]),
    ("not a degree", "", ["parallel.tp=all"], ["parallel.tp: 'all' is not a whole number", "auto"]),
    ("no such include", "", ["model=tinyy"], ["model: 'tinyy' has no file; did you mean 'tiny'? (command line)"]),
    ("include is no name", "", ["model=5"], ["model: 5 must be the name of a file; quote one"]),
    ("override without =", "", ["parallel.tp"], ["command line: 'parallel.tp' is not key=value"]),
    ("missing data", "", ["data.path=/nowhere/at/all"], ["data.path: '/nowhere/at/all' does not exist"]),
    ("missing variable", "", ["data.path=${oc.env:ORC_SURELY_UNSET}"], ["data.path: cannot be resolved", "ORC_SURELY"]),
    ("zero", "", ["training.steps=0"], ["training.steps: 0 must be at least 1"]),
    ("negative degree", "", ["parallel.pp=-1"], ["parallel.pp: -1 must be at least 1"]),
    ("negative wait", "", ["policy.backoff_s=-1"], ["policy.backoff_s: -1.0 must not be negative"]),
    ("unknown gpu", "", ["cluster.gpu=h1000"], ["cluster.gpu: 'h1000' is unknown; did you mean 'h100'?"]),
    ("run with a path", "", ["run=a/b"], ["run: 'a/b' must be a plain name"]),
    ("fault outside the world", "faults: [{attempt: 1, step: 1, rank: 8, kind: exit}]\n", [],
     ["faults[0].rank: 8 is outside the 8 ranks of the run (run.yaml:6)"]),
    ("unknown fault", "faults: [{attempt: 1, step: 1, rank: 0, kind: fire}]\n", [], ["faults: ", "'fire'", "sigkill"]),
    ("only spares", "", ["placement.spares=2"], ["placement.spares: 2 leaves no node to train on"]),
    ("zero link", "", ["cluster.inter_node_gb_s=0"], ["cluster.inter_node_gb_s: 0.0 must be more than 0"]),
    ("negative threads", "", ["cluster.threads_per_rank=-4"], ["cluster.threads_per_rank: -4 must be at least 1"]),
    ("not a number", "", ["training.optimizer.lr=.nan"], ["training.optimizer.lr: nan is not a finite number"]),
    ("endless", "", ["policy.heartbeat_s=.inf"], ["policy.heartbeat_s: inf is not a finite number"]),
    ("beta", "", ["training.optimizer.beta1=2"], ["training.optimizer.beta1: 2.0 must be below 1"]),
    ("huge seed", "", ["training.seed=100000000000000000000000"],
     ["training.seed: 100000000000000000000000 is too large"]),
    ("fault before the first step", "faults: [{attempt: 1, step: 0, rank: 0, kind: exit}]\n", [],
     ["faults[0].step: 0 must be at least 1 (run.yaml:6)"]),
    ("weights that a command alone has", "faults: [{attempt: 1, step: 1, rank: 0, kind: nan}]\ncommand: [sh]\n", [],
     ["faults: 'nan' damages weights, which the built-in trainer alone can"]),
    ("empty command", "command: []\n", [], ["command: [] names no program"]),
    ("command that is not there", "command: [nosuchprogram, x]\n", [], ["command: 'nosuchprogram' is no program"]),
    ("unescaped $ in a command", "command: [sh, -c, 'echo ${RANK}']\n", [], ["command", "cannot be resolved", "\\$"]),
    ("interpolation of itself", "", ["run=${run}"], ["cannot be resolved"]),
    ("unreadable override", "", ["[=1"], ["command line: '[=1' is not key=value"]),
    ("text that YAML would take for an alias", "", ["data.path=*x"], ["data.path: '", "*x' does not exist"]),
    ("text that YAML would take for an anchor", "", ["data.path=&x"], ["data.path: '", "&x' does not exist"]),
    ("text that YAML would take for a comment", "", ["data.path=#x"], ["data.path: '", "#x' does not exist"]),
    ("text that YAML would take for a mapping", "", ["model=null", "model.entrypoint=bad:", "model.vocab_size=9"],
     ["model.entrypoint: 'bad:'"]),
    ("a decoder's size for a model of one's own", "", ["model.entrypoint=a.b:c"],
     ["model.dim: is of orc's own decoder, not of a model.entrypoint; set model=null"]),
    ("unknown home", "", ["cluster=~nouser/a.yaml"], ["cluster: '~nouser/a.yaml' has no file"]),
    ("a folder's home", "", ["cluster=/etc"], ["cluster: '/etc' has no file; valid: a100, b200"]),
    ("endless name", "", ["cluster=" + 5000 * "x"], ["has no file"]),
    ("thousands of digits", "", ["training.steps=" + 5000 * "9"], ["training.steps"]),
    ("headroom", "", ["memory.headroom=1.5"], ["memory.headroom: 1.5 must be below 1"]),
    ("nothing to train", "", ["model=null", "cluster=desk"], ["model: is missing; give it, or a `command:`"]),
]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    for folder, name, text in (("models", "tiny", MODEL), ("clusters", "desk", CLUSTER), ("runs", "run", RUN)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.yaml").write_text(text)
    return tmp_path / "runs" / "run.yaml"


def refusal(run_file: Path, overrides: list[str]) -> str:
    with pytest.raises(SpecError) as refused:
        load(run_file, overrides)
    return str(refused.value).replace(str(run_file), "run.yaml").replace("  (", " (")


@pytest.mark.parametrize("text, overrides, parts", [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS])
def test_refusal_names_value_origin_and_remedy(run_file: Path, text: str, overrides: list[str],
                                               parts: list[str]) -> None:
    run_file.write_text(RUN + text)
    message = refusal(run_file, overrides)
    for part in parts:
        assert part in message


def test_all_problems_are_reported_at_once(run_file: Path) -> None:
    message = refusal(run_file, ["training.steps=many", "parallel.tpp=2", "cluster.num_nodes=none", "foo=1"])
    assert [line.partition(":")[0] for line in message.splitlines()] == [
        "training.steps", "parallel.tpp", "cluster.num_nodes", "foo"]


def test_overrides_win_over_the_run_and_the_run_over_its_includes(run_file: Path) -> None:
    run_file.write_text(RUN.replace("cluster: desk", "cluster: {include: desk, num_nodes: 3, gpus_per_node: 5}"))
    config = load(run_file, ["cluster.num_nodes=4"])
    assert (config.cluster.num_nodes, config.cluster.gpus_per_node, config.cluster.name) == (4, 5, "desk")


def test_command_line_replaces_an_include(run_file: Path) -> None:
    other = run_file.parent.parent / "clusters" / "other.yaml"
    other.write_text(CLUSTER.replace("num_nodes: 2", "num_nodes: 7"))
    assert load(run_file, ["cluster=other"]).cluster.num_nodes == 7


def test_free_form_sbatch_parameters_pass_through(run_file: Path) -> None:
    config = load(run_file, ["cluster.slurm.extra.reservation=big", "cluster.slurm.setup=[module load cuda]"])
    assert config.cluster.slurm.extra == {"reservation": "big"}
    assert config.cluster.slurm.setup == ["module load cuda"]


def test_resolved_yaml_loads_to_an_equal_config(run_file: Path) -> None:
    run_file.write_text(RUN + "faults: [{attempt: 1, step: 3, rank: 7, kind: sigkill}]\n")
    config = load(run_file, ["parallel.tp=2", "cluster.slurm.extra.gres_flags=x"])
    resolved = run_file.with_name("resolved.yaml")
    resolved.write_text(to_yaml(config))
    assert load(resolved) == config


UNREADABLE = [("latin-1", "run: caf\u00e9".encode("latin-1")), ("nesting", b"a: " + b"[" * 3000),
              ("digits", b"run: " + b"9" * 5000), ("a list", b"- a"), ("a tab", b"a:\n\t- b"), ("a folder", None)]


@pytest.mark.parametrize("content", [c[1] for c in UNREADABLE], ids=[c[0] for c in UNREADABLE])
def test_an_unreadable_file_is_named(run_file: Path, content: bytes | None) -> None:
    path = run_file.with_name("bad.yaml")
    path.mkdir() if content is None else path.write_bytes(content)
    assert str(path) in refusal(path, []) or "run" in refusal(path, [])


def test_paths_are_absolute_from_where_the_command_was_typed(run_file: Path, monkeypatch) -> None:
    monkeypatch.chdir(run_file.parent)
    config = load(run_file, ["data.path=run.yaml", "root=here"])
    assert config.data.path == str(run_file) and config.run_dir == run_file.parent / "here" / "try"


def test_an_escaped_dollar_reaches_the_command_and_the_stored_config(run_file: Path) -> None:
    config = load(run_file, ["model=null", "training=null", "data=null", "command=[sh, -c, 'echo \\${RANK}']"])
    assert config.command == ["sh", "-c", "echo ${RANK}"]
    stored = run_file.with_name("stored.yaml")
    stored.write_text(to_yaml(config))
    assert read_stored(stored) == config


def test_a_stored_config_is_read_without_looking_anything_up(run_file: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text")
    stored = run_file.with_name("stored.yaml")
    stored.write_text(to_yaml(load(run_file, [f"data.path={text}"])))
    text.unlink()
    assert read_stored(stored).data.path == str(text)


def test_a_command_needs_no_model(run_file: Path) -> None:
    run_file.write_text("run: mine\ncluster: desk\ncommand: [python, train.py]\n")
    assert load(run_file).command == ["python", "train.py"]


WORDS = ["yes", "0777", "1e3", "12e4567", "1_0", "null-and-void", "on", "No", "0o7", "2026-11-30", "0x10", "true"]


@pytest.mark.parametrize("value", WORDS)
def test_what_is_written_for_a_name_is_the_name(run_file: Path, value: str) -> None:
    assert load(run_file, [f"run={value}", f"wandb={{tags: [{value}]}}"]).wandb.tags == [value]
    run_file.write_text(RUN.replace("try", value) + f"wandb: {{tags: [a, {value}], entity: {value}}}\n"
                        f"command: [sh, {value}]\n")
    config = load(run_file)
    assert (config.run, config.wandb.entity, config.wandb.tags) == (value, value, ["a", value])
    assert config.command == ["sh", value]


def test_a_name_inside_of_a_list_and_behind_a_merge_is_what_is_written(run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "no").write_text("text " * 2000)
    run_file.write_text(RUN.replace('{path: "${python_stdlib:}"}', f"{{sources: [{{path: {tmp_path}/no, pattern: on, "
                                    "exclude: [off, 1_0]}]}")
                        + "wandb: {<<: {project: 1e3, mode: off}, entity: ~}\n")
    message = refusal(run_file, [])
    assert "wandb.mode: 'off'" in message and "(run.yaml:6)" in message
    run_file.write_text(run_file.read_text().replace(", mode: off", ""))
    config = load(run_file)
    assert (config.wandb.project, config.wandb.entity) == ("1e3", None)
    assert (config.data.sources[0].pattern, tuple(config.data.sources[0].exclude)) == ("on", ("off", "1_0"))


def test_a_folder_may_have_a_hash_behind_a_space(run_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data #old"
    folder.mkdir()
    (folder / "a.txt").write_text("text " * 2000)
    assert load(run_file, [f"data.path={folder}"]).data.path == str(folder)
