#!/usr/bin/env python3
"""The bill of materials of `folio`: CycloneDX 1.6 JSON of every crate that is compiled into it, from `cargo metadata`.

    tools/sbom.py > folio.cdx.json       # for this machine's target; --target TRIPLE for another
    tools/sbom.py --check                # that it is one, and that nothing lacks a license

The same tree makes the same bytes: there is no time and no random number in it.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BINARY = "folio"
# What cargo's field had before SPDX expressions: `MIT/Apache-2.0`.
SLASH = re.compile(r"\s*/\s*")


def metadata(target):
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)


def host():
    told = subprocess.run(["rustc", "-vV"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return re.search(r"^host: (.*)$", told, re.MULTILINE)[1]


def checksums():
    """Of crates from the registry, by name and version."""
    found = {}
    for package in (ROOT / "Cargo.lock").read_text().split("[[package]]")[1:]:
        fields = dict(re.findall(r'^(name|version|checksum) = "(.*)"$', package, re.MULTILINE))
        if "checksum" in fields:
            found[fields["name"], fields["version"]] = fields["checksum"]
    return found


def compiled(tree):
    """For each crate that the binary is made with, what it is made with: without what only tests need."""
    nodes = {node["id"]: node for node in tree["resolve"]["nodes"]}
    names = {package["id"]: package["name"] for package in tree["packages"]}
    (root,) = (id for id in tree["workspace_members"] if names[id] == BINARY)
    found, left = {}, [root]
    while left:
        id = left.pop()
        if id in found:
            continue
        deps = (dep for dep in nodes[id]["deps"] if any(kind["kind"] != "dev" for kind in dep["dep_kinds"]))
        found[id] = sorted({dep["pkg"] for dep in deps})
        left.extend(found[id])
    return root, found


def component(package, sums):
    name, version = package["name"], package["version"]
    told = {
        "type": "library",
        "bom-ref": reference(package),
        "name": name,
        "version": version,
        "licenses": [{"expression": SLASH.sub(" OR ", package["license"] or "")}],
        "purl": reference(package),
    }
    if checksum := sums.get((name, version)):
        told["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if package.get("repository"):
        told["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return told


def reference(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def bill(target):
    tree, sums = metadata(target), checksums()
    root, crates = compiled(tree)
    packages = {package["id"]: package for package in tree["packages"]}
    order = sorted(crates, key=lambda id: reference(packages[id]))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {**component(packages[root], sums), "type": "application"},
            "properties": [{"name": "cargo:target", "value": target}],
        },
        "components": [component(packages[id], sums) for id in order if id != root],
        "dependencies": [
            {"ref": reference(packages[id]), "dependsOn": sorted(reference(packages[dep]) for dep in crates[id])}
            for id in order
        ],
    }


def wrong(bom, locked):
    """What a reader of the format would stumble over. `locked`: names and versions of the lock file."""
    crates = [bom["metadata"]["component"], *bom["components"]]
    known = {crate["bom-ref"] for crate in crates}
    if len(known) != len(crates):
        yield "a crate is there twice"
    for crate in crates:
        name = f"{crate['name']} {crate['version']}"
        if (crate["name"], crate["version"]) not in locked:
            yield f"{name} is not in Cargo.lock"
        if crate["purl"] != f"pkg:cargo/{crate['name']}@{crate['version']}":
            yield f"{name}: the purl is {crate['purl']}"
        expression = crate["licenses"][0]["expression"]
        if not re.fullmatch(r"\(?[A-Za-z0-9.-]+(\)? (OR|AND|WITH) \(?[A-Za-z0-9.-]+)*\)?", expression):
            yield f"{name}: {expression!r} is no license expression"
    for entry in bom["dependencies"]:
        for missing in {entry["ref"], *entry["dependsOn"]} - known:
            yield f"{missing} is depended on and not there"
    for unused in known - {entry["ref"] for entry in bom["dependencies"]}:
        yield f"it is not said what {unused} depends on"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="of the binary; this machine's without it")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    bom = bill(asked.target or host())
    if not asked.check:
        json.dump(bom, sys.stdout, indent=1)
        return print()
    lock = (ROOT / "Cargo.lock").read_text()
    locked = set(re.findall(r'^name = "(.*)"\nversion = "(.*)"$', lock, re.MULTILINE))
    if found := list(wrong(bom, locked)):
        sys.exit("the bill of materials is wrong: " + "; ".join(found))
    print(f"{len(bom['components'])} crates are in the binary, each with a version, a purl and a license")


if __name__ == "__main__":
    main()
