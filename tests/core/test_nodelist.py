"""Slurm's compact lists: what they mean, and where a wrong one is wrong."""

from __future__ import annotations

import pytest

from dslaunch.core.errors import HostfileError
from dslaunch.core.nodelist import MAX_HOSTS, expand_counts, expand_nodelist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1", "gpu1"),
        ("gpu[001-003,7],x", "gpu001 gpu002 gpu003 gpu7 x"),
        ("nodeA,nodeB[001,003],nodeC", "nodeA nodeB001 nodeB003 nodeC"),
        ("a[1-2]b[3-4]", "a1b3 a1b4 a2b3 a2b4"),
        ("r[1-2]n[09-10]", "r1n09 r1n10 r2n09 r2n10"),
        ("r10i1n[12-15]", "r10i1n12 r10i1n13 r10i1n14 r10i1n15"),
        ("n[1-2]-ib", "n1-ib n2-ib"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[0-1,00-01]", "n0 n1 n00 n01"),
        ("n[3].cluster.org", "n3.cluster.org"),
        ("b,a", "b a"),
        ("[1-2]", "1 2"),
    ],
)
def test_lists(text: str, hosts: str) -> None:
    assert expand_nodelist(text, "LIST") == tuple(hosts.split())


@pytest.mark.parametrize(
    ("text", "where", "part"),
    [
        ("", 1, "a host name is missing"),
        ("a,", 3, "a host name is missing"),
        ("a,,b", 3, "a host name is missing"),
        ("n[1-2", 2, "'[' is not closed"),
        ("a,n[1-2,b", 4, "'[' is not closed"),
        ("n1-2]", 5, "']' without '['"),
        ("n[1-[2]]", 5, "a bracket inside"),
        ("n[]", 3, "'' is not a number"),
        ("n[1,]", 5, "'' is not a number"),
        ("n[1-]", 3, "'1-' is not a number"),
        ("n[1-2-3]", 3, "'1-2-3' is not a number"),
        ("n[1,a]", 5, "'a' is not a number"),
        ("n[1:3]", 3, "'1:3' is not a number"),
        ("n[ 1]", 3, "' 1' is not a number"),
        ("n[-1]", 3, "'-1' is not a number"),
        ("n[²]", 3, "'²' is not a number"),
        ("a,n[1,7-3]", 7, "7-3 runs backwards"),
        ("n[1-010]", 3, "differ in their zeros"),
        ("n[0-999999999]", 3, "0-999999999 is more than 65536 hosts"),
        ("n[1-99999999999999999999]", 3, "more than 12 digits"),
        ("x,n[1-300]m[1-300]", 3, "with 'n[1-300]m[1-300]' it is more than 65536 hosts"),
        ("n[1-65000],m[1-65000]", 12, "more than 65536 hosts"),
        ("-oProxyCommand=x", 1, "is not a host name"),
        ("a b", 1, "is not a host name"),
        ("a;reboot", 1, "is not a host name"),
        ("a\n", 1, "is not a host name"),
        ("a,ünode", 3, "is not a host name"),
        ("a@b", 1, "is not a host name"),
    ],
)
def test_wrong_lists(text: str, where: int, part: str) -> None:
    with pytest.raises(HostfileError) as caught:
        expand_nodelist(text, "LIST")
    assert caught.value.message.startswith(f"LIST:{where}: ")
    assert part in caught.value.message


def test_the_largest_list() -> None:
    hosts = expand_nodelist(f"n[1-{MAX_HOSTS}]", "LIST")
    assert (len(hosts), hosts[-1]) == (MAX_HOSTS, f"n{MAX_HOSTS}")
    # Three brackets of 60,000 each: refused from their sizes, never expanded together.
    with pytest.raises(HostfileError, match="more than 65536 hosts"):
        expand_nodelist("n[1-60000]m[1-60000]k[1-60000]", "LIST")
    with pytest.raises(HostfileError) as caught:
        expand_nodelist("a[1-2]" * 20_000, "LIST")
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", (4,)), ("2(x3),1", (2, 2, 2, 1)), ("72(x2),36", (72, 72, 36)), ("1,2,3", (1, 2, 3))],
)
def test_counts(text: str, counts: tuple[int, ...]) -> None:
    assert expand_counts(text, "COUNTS") == counts


@pytest.mark.parametrize(
    ("text", "where"),
    [("", 1), ("2(x3", 1), ("1,2(3)", 3), ("1,,2", 3), ("a", 1), ("-1", 1), ("1(x999999)", 1)],
)
def test_wrong_counts(text: str, where: int) -> None:
    with pytest.raises(HostfileError, match=rf"COUNTS:{where}: .* is not a number or NUMBER"):
        expand_counts(text, "COUNTS")
