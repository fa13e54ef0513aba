"""Public and internal addresses; parsing of hosts and allow-lists."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import InvalidInputError
from bottega.tools.guard import AllowList, host_address, why_refused

INSIDE = {
    "127.0.0.1": "loopback",
    "127.255.255.254": "loopback",
    "0.0.0.0": "unspecified",
    "10.1.2.3": "private",
    "172.16.0.1": "private",
    "172.31.255.255": "private",
    "192.168.0.1": "private",
    "100.64.0.1": "private",
    "169.254.169.254": "link-local",
    "168.63.129.16": "cloud metadata",
    "192.0.0.192": "reserved",
    "192.0.2.1": "reserved",
    "192.88.99.1": "reserved",
    "198.18.0.1": "private",
    "203.0.113.9": "reserved",
    "224.0.0.1": "multicast",
    "239.255.255.250": "multicast",
    "240.0.0.1": "reserved",
    "255.255.255.255": "reserved",
    "::": "unspecified",
    "::1": "loopback",
    "fe80::1": "link-local",
    "fe80::1%eth0": "link-local",
    "2606:4700::1111%eth0": "link-local",
    "fc00::1": "private",
    "fd00:ec2::254": "private",
    "fec0::1": "private",
    "ff02::1": "multicast",
    "::ffff:127.0.0.1": "loopback",
    "::ffff:10.0.0.1": "private",
    "::ffff:a9fe:a9fe": "link-local",
    "::127.0.0.1": "reserved",
    "::ffff:0:127.0.0.1": "reserved",
    "64:ff9b::127.0.0.1": "loopback",
    "64:ff9b::10.0.0.1": "private",
    "64:ff9b:1::10.0.0.1": "reserved",
    "2002:7f00:1::": "reserved",
    "2002:808:808::": "reserved",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2": "reserved",
    "2001:db8::1": "reserved",
    "3fff::1": "reserved",
    "5f00::1": "reserved",
    "100::1": "reserved",
}


@pytest.mark.parametrize(("address", "reason"), INSIDE.items())
def test_internal_address_is_refused_with_its_reason(address: str, reason: str) -> None:
    assert why_refused(ip_address(address)) == reason


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8",
        "1.1.1.1",
        "100.128.0.1",
        "172.32.0.1",
        "2606:4700:4700::1111",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
        "2a00:1450:4001::1",
    ],
)
def test_public_address_is_accepted(address: str) -> None:
    assert why_refused(ip_address(address)) is None


@given(st.ip_addresses(v=4))
def test_ipv6_form_of_an_ipv4_address_is_judged_like_it(address: IPv4Address) -> None:
    reason = why_refused(address)
    for prefix in (0xFFFF << 32, 0x0064_FF9B << 96):
        assert why_refused(IPv6Address(prefix | int(address))) == reason


@given(st.ip_addresses())
def test_every_address_that_python_calls_private_is_refused(
    address: IPv4Address | IPv6Address,
) -> None:
    embeds = any(address in ip_network(block) for block in ("::ffff:0:0/96", "64:ff9b::/96"))
    if not embeds and (address.is_private or address.is_multicast or address.is_reserved):
        assert why_refused(address) is not None


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f000001",
        "0x7f.0.0.1",
        "0177.0.0.1",
        "127.1",
        "127.0.1",
        "127.0.0.1.",
        "017700000001",
        "0x7f.1",
        "1.2.3.4.5",
        "256.1.1.1",
        "evil.0x7f",
        "0x",
        "127.0.0.01",
    ],
)
def test_odd_spellings_of_ipv4_are_refused(host: str) -> None:
    with pytest.raises(InvalidInputError, match="unusual spelling"):
        host_address(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        ".",
        "a..b",
        "a b",
        "a%2eb",
        "a,b",
        "-a",
        "a" * 64,
        "a." * 130 + "b",
        "[::1]",
        "ä.de",
        "a\x00b",
        "a/b",
        "a@b",
        "*.a",
        "a\n",
    ],
)
def test_invalid_host_name_is_refused(host: str) -> None:
    with pytest.raises(InvalidInputError, match="not a valid host name"):
        host_address(host)


@pytest.mark.parametrize("host", ["localhost", "a.example.", "_dmarc.a-b.c", "x1.2y", "1.de"])
def test_valid_host_name_needs_resolving(host: str) -> None:
    assert host_address(host) is None


def test_allow_list_accepts_names_addresses_and_blocks() -> None:
    allowed = AllowList.parse(["Intern.Example.", " 10.1.0.0/16", "127.0.0.1", "[fd00::1]"])
    assert allowed.has_name("intern.example")
    assert allowed.has_name("intern.example.")
    assert not allowed.has_name("sub.intern.example")
    for inside in ("10.1.2.3", "127.0.0.1", "fd00::1", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3"):
        assert allowed.has_address(ip_address(inside)), inside
    for outside in ("10.2.0.1", "127.0.0.2", "fd00::2", "::ffff:10.2.0.1", "::10.1.2.3"):
        assert not allowed.has_address(ip_address(outside)), outside


@pytest.mark.parametrize(
    "entry",
    ["", "*", "10.0.0.1/8", "10.0.0.0/33", "http://a.example", "a.example:80", "127.1", "a b"],
)
def test_invalid_entry_is_named(entry: str) -> None:
    with pytest.raises(InvalidInputError, match=r"not a (host|CIDR)"):
        AllowList.parse([entry])
