"""A run's files: access rights."""

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid5

import pytest

from bottega.errors import BottegaError, InvalidInputError
from bottega.subagents.shared_context import SharedContext, Workspace

ROOT = UUID(int=1)
CHILD, SIBLING, GRANDCHILD = (uuid5(ROOT, name) for name in ("child", "sibling", "grandchild"))
PARENTS = {CHILD: None, SIBLING: None, GRANDCHILD: CHILD}


def is_child_of(who: UUID | None) -> Callable[[UUID], bool]:
    return lambda task_id: task_id in PARENTS and PARENTS[task_id] == who


class Family:
    """Workspaces of a root, two children and a grandchild, each with its own file."""

    def __init__(self) -> None:
        self.context = SharedContext()
        self.root, self.child, self.sibling, self.grandchild = (
            Workspace(self.context, who, is_child_of(who))
            for who in (None, CHILD, SIBLING, GRANDCHILD)
        )

    async def write_all(self) -> "Family":
        for space in (self.root, self.child, self.sibling, self.grandchild):
            await space.write(f"{space.folder}output", f"of {space.folder}")
            await space.write("draft", f"private to {space.folder}")
        return self


async def refusal(coroutine: Any) -> tuple[str, str]:
    with pytest.raises(BottegaError) as refused:
        await coroutine
    return refused.value.code, refused.value.detail


def inside(task_id: UUID, name: str = "output") -> str:
    return f"/subagent/{task_id}/{name}"


async def test_global_is_written_by_the_root_and_read_by_all() -> None:
    family = await Family().write_all()
    for space in (family.child, family.grandchild):
        assert await space.read("/global/output") == "of /global/"
        assert await space.read("global/output") == "of /global/"
        code, detail = await refusal(space.write("/global/output", "mine"))
        assert code == "read_only"
        assert space.folder in detail
    assert await family.root.read("/global/output") == "of /global/"


async def test_child_reads_and_writes_its_own_folder_only() -> None:
    family = await Family().write_all()
    for name in ("input", "input/a", "output", "scratch/a/b"):
        await family.child.write(inside(CHILD, name), name)
        assert await family.child.read(inside(CHILD, name)) == name
    for other in (SIBLING, ROOT):
        assert (await refusal(family.child.read(inside(other))))[0] == "not_found"
        assert (await refusal(family.child.write(inside(other), "mine")))[0] == "not_found"
    assert await family.sibling.read(inside(SIBLING)) == f"of {family.sibling.folder}"


async def test_parent_reads_its_childs_whole_folder_and_writes_its_input() -> None:
    family = await Family().write_all()
    assert await family.root.read(inside(CHILD)) == f"of {family.child.folder}"
    for name in ("input", "input/part 1"):
        await family.root.write(inside(CHILD, name), "do this")
        assert await family.child.read(inside(CHILD, name)) == "do this"
    for name in ("output", "inputs", "scratch/input", "Input"):
        assert (await refusal(family.root.write(inside(CHILD, name), "mine")))[0] == "read_only"


async def test_grandparent_and_grandchild_do_not_see_each_other() -> None:
    family = await Family().write_all()
    assert await family.child.read(inside(GRANDCHILD)) == f"of {family.grandchild.folder}"
    assert (await refusal(family.root.read(inside(GRANDCHILD))))[0] == "not_found"
    assert (await refusal(family.root.write(inside(GRANDCHILD, "input"), "a")))[0] == "not_found"
    assert (await refusal(family.grandchild.read(inside(CHILD))))[0] == "not_found"


async def test_another_tasks_folder_looks_nonexistent() -> None:
    family = await Family().write_all()
    nobody = uuid5(ROOT, "nobody")
    for name in ("output", "other"):
        there, not_there = inside(SIBLING, name), inside(nobody, name)
        for path, act in (
            (path, act)
            for path in (there, not_there, f"/subagent/{{{SIBLING}}}/{name}")
            for act in (family.child.read, lambda path: family.child.write(path, "x"))
        ):
            code, detail = await refusal(act(path))
            assert code == "not_found"
            assert detail.replace(path, "PATH") == (
                "there is no file 'PATH' that you may use; list_files lists your files"
            )
    assert family.child.list(f"/subagent/{SIBLING}") == family.child.list(f"/subagent/{nobody}")


@pytest.mark.parametrize("spelling", [str(CHILD).upper(), f"{{{CHILD}}}", CHILD.hex, CHILD.urn])
async def test_childs_folder_has_one_name(spelling: str) -> None:
    family = await Family().write_all()
    for name in ("output", "input"):
        path = f"/subagent/{spelling}/{name}"
        assert (await refusal(family.root.read(path)))[0] == "not_found"
        assert (await refusal(family.root.write(path, "mine")))[0] == "not_found"
        assert (await refusal(family.child.write(path, "mine")))[0] == "not_found"


async def test_private_files_are_private() -> None:
    family = await Family().write_all()
    assert await family.child.read("draft") == f"private to {family.child.folder}"
    assert await family.root.read("/draft") == "private to /global/"


async def test_list_shows_only_readable_files() -> None:
    family = await Family().write_all()
    assert family.root.list() == sorted(
        ["/draft", "/global/output", inside(CHILD), inside(SIBLING)]
    )
    assert family.child.list("/") == sorted(
        ["/draft", "/global/output", inside(CHILD), inside(GRANDCHILD)]
    )
    assert family.grandchild.list() == sorted(["/draft", "/global/output", inside(GRANDCHILD)])
    await family.root.write("/global/outputs/1", "x")
    assert family.child.list("global/output") == ["/global/output"]
    assert family.child.list("/global/outputs/") == ["/global/outputs/1"]
    assert family.child.list("/subagent") == sorted([inside(CHILD), inside(GRANDCHILD)])
    with pytest.raises(InvalidInputError):
        family.child.list("/global/..")


@pytest.mark.parametrize(
    "path", ["/global", "/subagent", f"/subagent/{CHILD}", "/Global/a", "/SUBAGENT/x/y", "globAL"]
)
async def test_folder_or_similar_path_is_no_file(path: str) -> None:
    family = await Family().write_all()
    for space in (family.root, family.child):
        assert (await refusal(space.read(path)))[0] == "bad_path"
        assert (await refusal(space.write(path, "x")))[0] == "bad_path"


async def test_accepted_write_is_accepted_again() -> None:
    tight = SharedContext(max_bytes=1, max_files=1, max_run_bytes=1)
    child = Workspace(tight, CHILD, lambda task_id: False)
    for path in ("notes", "/more", inside(CHILD), inside(GRANDCHILD, "input/a"), "global/a"):
        tight.restore(path, f"in {path}", child.private)
    assert await child.read("/notes") == "in notes"
    assert await child.read("more") == "in /more"
    assert await child.read(inside(CHILD)) == f"in {inside(CHILD)}"
    assert await child.read("/global/a") == "in global/a"
    parent = Workspace(tight, None, lambda task_id: True)
    assert await parent.read(inside(GRANDCHILD, "input/a")) == f"in {inside(GRANDCHILD, 'input/a')}"


async def test_refused_write_leaves_no_file_and_forgotten_folder_no_bytes() -> None:
    context = SharedContext(max_bytes=5)
    with pytest.raises(InvalidInputError, match="too large"):
        context.write("/global/a", "x" * 6)
    assert (context.folders(), context.used) == ((), 0)
    context.write("/global/a", "xyz")
    context.forget("/global")
    assert (context.folders(), context.used) == ((), 0)


async def test_only_a_workspace_has_private_files() -> None:
    with pytest.raises(InvalidInputError, match="is not a shared file"):
        SharedContext().write("draft", "x")
