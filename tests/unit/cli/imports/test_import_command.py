"""``cpumond tree import``: the file on standard output, on standard error what it cannot say; mistakes."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from imported import DATA, read

from cpumond.cli import run
from cpumond.cli.imports import options
from cpumond.cli.imports.command import find_reader
from cpumond.cli.scheduler.tree_text import read_tree_text
from cpumond.core.errors import ConfigError
from cpumond.core.toml_text import MAX_CHARACTERS

FAIR = "<allocations><queue name='a'>{}</queue></allocations>"
PROPERTY = "<property><name>yarn.scheduler.capacity.root.{}</name><value>{{}}</value></property>"
CAPACITY = f"<configuration>{PROPERTY.format('queues').format('a')}{PROPERTY.format('a.capacity')}</configuration>"
DUMP = "Cluster - 't'\nParent - 'root'\n"
QUEUE = "{{apiVersion: v1, kind: ClusterQueue, metadata: {{name: {0}}}, spec: {{cohort: {1}}}}}\n"
QUOTA = """{kind: ClusterQueue, metadata: {name: a}, spec: {resourceGroups: [{flavors: [{name: f, resources: [
  {name: cpu, nominalQuota: 1, borrowingLimit: <}]}]}]}}"""
COHORT = "{{kind: Cohort, metadata: {{name: {0}}}, spec: {{parentName: {1}}}}}\n"


def test_the_file_can_be_read_and_all_else_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    names = [str(DATA / name) for name in ("slurm.dump", "slurm.conf", "slurm.qos")]
    assert run(["tree", "import", "slurm", *names, "--tree", "tara"]) == 0
    out, err = capfd.readouterr()
    found = read_tree_text(out, "out.toml", "toml")
    assert found.tree == "tara"
    pools = {pool.name: pool for pool in found.tables.pools or ()}
    assert len(pools) == 18
    assert pools["guests"].options == {
        "create_ephemeral_subpools": True,
        "ephemeral_subpool_config": {"max_running_operation_count": 4, "max_operation_count": 20},
        "max_operation_count": 400,
        "max_running_operation_count": 40,
        "weight": 2,
    }
    assert (pools["frances"].parent, pools["frances"].options) == ("catalysis", {"weight": 2})
    assert pools["projects"].options == {"flatten": True}
    assert "not expressible: GrpTRESMins: " in err
    assert f"  {names[0]}:6: account chemistry: cpu=6000000\n" in err
    assert f"  {names[0]}:38: account vision: node=8\n" in err
    assert "of the daemons, and left out: " in err
    assert err.splitlines()[-1].startswith("18 pools; options: ")


@pytest.mark.parametrize(
    "names",
    [("slurm.dump", "slurm.conf", "slurm.qos"), ("fair-scheduler.xml",), ("capacity-scheduler.xml",), ("queues.yaml",),
     ("kueue.yaml",)],
)  # fmt: skip
def test_nothing_of_a_real_configuration_is_unknown(names: tuple[str, ...]) -> None:
    making = read(*names, total={"cpu": 1000.0, "memory": 2.0**42})
    tables = making.finish("default")
    assert 15 <= len(tables.pools or ()) <= 40
    assert [note for note in making.notes if note.verdict == "not known"] == []
    assert all(note.where or note.option in ("mode", "guarantee") for note in making.notes)
    assert set(making.counts) <= set(options.SIGNS.values())


def test_a_list_of_slurm_is_read_as_a_dump() -> None:
    listed = "Account|User|Share|GrpTRES\nroot||1|\n physics||40|cpu=3\n  astro||5|\n  astro|carl|4|\n chemistry||30|\n"
    making = find_reader("slurm")({"assoc": listed}, {})
    pools = {pool.name: (pool.parent, pool.options.get("weight")) for pool in making.pools.values()}
    assert pools == {"physics": ("<Root>", 40), "astro": ("physics", 5), "chemistry": ("<Root>", 30)}


def test_what_only_one_user_may_is_a_pool_of_that_user() -> None:
    text = DUMP + "Account - 'a':FairShare=1\nParent - 'a'\nUser - 'u':GrpTRES=cpu=5:MaxJobs=2\nUser - 'v'\n"
    making = find_reader("slurm")({"d": text}, {})
    assert making.pools["u"].options == {"resource_limits": {"cpu": 5.0}, "max_running_operation_count": 2}
    assert making.pools["a"].options["create_ephemeral_subpools"] is True


@pytest.mark.parametrize(("kind", "texts", "sentence"), [
    ("yarn", {"f.xml": "<!DOCTYPE a [<!ENTITY b 'c'>]><allocations/>"}, r"f\.xml:1: a DOCTYPE is not accepted"),
    ("yarn", {"f.xml": "<a>" * 101}, r"f\.xml:1: elements are nested deeper than 100"),
    ("yarn", {"f.xml": "<allocations>\n<queue>"}, r"f\.xml:2: is not XML: "),
    ("yarn", {"f.xml": "<html/>"}, "neither <allocations> of a fair scheduler nor"),
    ("yarn", {"f.xml": "<configuration/>"}, "these files contain no queues"),
    ("yarn", {"f.xml": FAIR.format("\n<weight>much</weight>")}, r'xml:2: queue a: weight cannot be read: "much"'),
    ("yarn", {"f.xml": FAIR.format("<maxResources>5</maxResources>")}, 'maxResources cannot be read: "5"'),
    ("yarn", {"f.xml": FAIR.format("<queue name=''/>")}, "queue a.: it has no name"),
    ("yarn", {"f.xml": CAPACITY.format("-1w")}, 'capacity cannot be read: "-1w"'),
    ("yarn", {"f.xml": FAIR.format("") .replace("</all", "<queue name='a'/></all")}, "queue a occurs twice"),
    ("slurm", {"d": DUMP + "Account - 'a':FairShare=many\n"}, "d:3: account a: Fairshare must be a number"),
    ("slurm", {"d": DUMP + "Account - 'a\n"}, "a quotation mark is not closed"),
    ("slurm", {"d": DUMP + "Acount - 'a'\n"}, "d:3: expected Cluster, Parent, Account or User"),
    ("slurm", {"d": DUMP + "Parent - 'b'\nAccount - 'a'\n"}, "d:4: account a: account b is not defined before it"),
    ("slurm", {"slurm.conf": "PriorityType=priority/basic\n"}, "no accounts; add the output of `sacctmgr dump"),
    ("slurm", {"l": "Account|User\nphysics|\n"}, "l:2: the cluster of account physics is unknown; use"),
    ("yunikorn", {"q.yaml": "partitions: []\n"}, "expected `partitions` with one entry, not 0"),
    ("yunikorn", {"q.yaml": "partitions: [{name: default}]\n"}, "these files contain no queues"),
    ("yunikorn", {"q.yaml": "partitions: [{queues: 5}]\n"}, "queues must be a list of tables"),
    ("yunikorn", {"q.yaml": "a: [\n"}, r"q\.yaml: in the document that begins in line 1: "),
    ("kueue", {"k.yaml": "---\n---\na: 1\na: 2\n"}, r'that begins in line 2: line 3: "a" occurs twice'),
    ("kueue", {"k.yaml": "---\n"}, "these files contain no queues"),
    ("kueue", {"k.yaml": "kind: ClusterQueue"}, "k.yaml:1: ClusterQueue : it has no name"),
    ("kueue", {"k.yaml": QUEUE.format("[a]", "b")}, "k.yaml:1: name must be a text"),
    ("kueue", {"k.yaml": QUOTA}, r"ClusterQueue a flavor f: borrowingLimit cannot be read: \"<\""),
    ("kueue", {"k.yaml": COHORT.format("a", "b") + "---\n" + COHORT.format("b", "a")}, "cohort a is above itself"),
    ("kueue", {"k.yaml": QUEUE.format("a", "b") + "---\n" + QUEUE.format("a", "c")}, "Queue a occurs twice"),
    ("kueue", {"k.yaml": "{kind: LocalQueue, metadata: {name: l}, spec: {clusterQueue: a}}"}, "Queue a is not"),
])  # fmt: skip
def test_a_mistake_is_one_sentence_with_its_place(kind: str, texts: Mapping[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        find_reader(kind)(texts, {}).finish("default")


@pytest.mark.parametrize(("kind", "text", "note"), [
    ("yarn", FAIR.format("<wieght>2</wieght>"), ("not known", "wieght")),
    ("yarn", FAIR.format("<maxResources>50% cpu</maxResources>"), ("not expressible", "maxResources")),
    ("yunikorn", "partitions: [{queues: [{name: a, colour: red}]}]", ("not known", "colour")),
    ("kueue", QUEUE.format("a", "b") + "---\n{kind: Job, metadata: {name: j}}", ("not known", "Job")),
    ("slurm", "Cluster - 't':GrpTRES=cpu=9\nParent - 'root'\nAccount - 'a'\n", ("not expressible", "GrpTRES")),
    ("slurm", DUMP + "User - 'root':FairShare=1\nAccount - 'a'\n", ("not expressible", "User")),
    ("slurm", DUMP + "Account - 'a':GrpTRES=license/matlab=4\n", ("not expressible", "GrpTRES")),
])  # fmt: skip
def test_what_is_not_known_is_told(kind: str, text: str, note: tuple[str, str]) -> None:
    making = find_reader(kind)({"file": text}, {})
    making.finish("default")
    assert note in [(each.verdict, each.option) for each in making.notes]


def test_a_cohort_may_have_the_name_of_a_queue() -> None:
    """Also one that is only named, by a queue after the one that has its name."""
    text = QUEUE.format("b", "a") + "---\n" + QUEUE.format("x", "b")
    pools = find_reader("kueue")({"k.yaml": text}, {}).pools
    parents = {pool.name: pool.parent for pool in pools.values()}
    assert parents == {"a": "<Root>", "b": "<Root>", "a:b": "a", "x": "b"}


def test_guarantees_of_parents_are_raised_to_those_below() -> None:
    inner = "<minResources>vcores=1</minResources><queue name='b'><minResources>1 mb, 2 vcores</minResources></queue>"
    making = find_reader("yarn")({"f": FAIR.format(inner)}, {})
    making.finish("default")
    assert making.pools["a"].options["strong_guarantee_resources"] == {"cpu": 2.0, "memory": 2.0**20}
    assert [note.subject for note in making.notes if note.option == "guarantee"] == ['pool "a"']


def test_queues_of_a_scheduler_that_is_not_in_use_are_told() -> None:
    making = read("fair-scheduler.xml", "capacity-scheduler.xml")
    told = {note.option for note in making.notes if note.verdict == "not expressible"}
    assert "yarn.scheduler.capacity.root.queues" in told


@pytest.mark.parametrize("total", ["cpu", "cpu=many", "beer=3"])
def test_a_wrong_total_is_refused(total: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["tree", "import", "yarn", str(DATA / "fair-scheduler.xml"), "--total", total]) == 64
    assert "--total: " in capfd.readouterr().err


def test_a_file_is_written_whole_or_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output, wrong = tmp_path / "tree.yaml", tmp_path / "wrong.xml"
    wrong.write_text("<html/>", encoding="utf-8")
    options = ["--output", str(output), "--format", "yaml"]
    assert run(["tree", "import", "kueue", str(DATA / "kueue.yaml"), *options]) == 0
    assert capfd.readouterr().out == ""
    text = output.read_text(encoding="utf-8")
    assert len(read_tree_text(text, "tree.yaml", "yaml").tables.pools or ()) == 18
    assert run(["tree", "import", "yarn", str(wrong), *options]) == 78
    assert output.read_text(encoding="utf-8") == text


def test_a_file_of_many_megabytes_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f.xml").write_text(" " * (MAX_CHARACTERS + 1), encoding="utf-8")
    assert run(["tree", "import", "yarn", str(tmp_path / "f.xml")]) == 78
    assert "it is longer than 8 MiB" in capfd.readouterr().err
