"""Recipes for virtual machines: the unit, the user data, and the group."""

from __future__ import annotations

import base64
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.recipes.folders import (
    RECIPES,
    VIRTUAL_MACHINES,
    config,
    directory,
    graces,
    page,
    seconds,
    text,
    unit,
)

pytestmark = pytest.mark.slow  # starts shells

SHARE = "10.0.0.2:/ckpt"
WHEEL = f"https://host/a/tfpreempt-1.0-py3-none-any.whl#sha256={'0f' * 32}"
# From the references of the commands; any other name is a typing error.
GCLOUD = {
    "boot-disk-size", "image-family", "image-project", "instance-termination-action",
    "machine-type", "metadata", "metadata-from-file", "provisioning-model", "size",
    "template", "zone",
}  # fmt: skip
AZ = {
    "admin-username", "custom-data", "disable-overprovision", "enable-spot-restore",
    "eviction-policy", "generate-ssh-keys", "image", "instance-count", "max-price",
    "name", "orchestration-mode", "priority", "resource-group", "spot-restore-timeout",
    "subnet", "vm-sku", "vnet-name",
}  # fmt: skip
AWS = {
    "auto-scaling-group-name", "cli-input-json", "launch-template-data",
    "launch-template-name", "vpc-zone-identifier",
}  # fmt: skip


def command(name: str, program: str) -> list[list[str]]:
    """Returns the calls of a cloud's command line in `create.sh`, as words."""
    joined = text(name, "create.sh").replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line.startswith(f"{program} ")]
    return [shlex.split(line) for line in lines]


def flags(words: list[str]) -> dict[str, str]:
    """The options of a call and their values, written with a blank or with `=`."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            option, equals, value = word[2:].partition("=")
            found[option] = value if equals else following
    return found


@pytest.mark.parametrize("name", VIRTUAL_MACHINES)
def test_systemd_understands_the_unit(name: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    # The interpreter of the recipe is not on this machine, which is an error too.
    source, found = re.subn(
        r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text(name, "train.service")
    )
    assert found == 1
    path = tmp_path / "train.service"
    path.write_text(source, encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", path],
        capture_output=True,
        text=True,
        timeout=60,
    )
    # A key that it does not know is a line, and no failure.
    complaints = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if "train.service" in line
    ]
    assert (done.returncode, complaints) == (0, [])


@pytest.mark.parametrize("name", VIRTUAL_MACHINES)
def test_the_unit_starts_again_on_the_configs_code(name: str) -> None:
    service = unit(text(name, "train.service"))["Service"]
    code = str(config(name).exit_code)
    assert service["RestartForceExitStatus"].split() == [code]
    assert service["SuccessExitStatus"].split() == [code]
    assert service["Restart"] == "on-failure"
    assert "RestartPreventExitStatus" not in service
    # The config watches SIGTERM, the default.
    assert "KillSignal" not in service
    assert service["KillMode"] == "mixed"


@pytest.mark.parametrize("name", VIRTUAL_MACHINES)
def test_the_unit_waits_longer_than_any_notice(name: str) -> None:
    parsed = unit(text(name, "train.service"))
    service = parsed["Service"]
    # 120: GCE has it as a setting of the VM. Azure's planned events leave 300 or more,
    # but are acknowledged, so they do not last.
    preemptions = [g for g in graces(config(name)) if g is not None and g < 300]
    longest = max(120.0, *preemptions)
    assert seconds(service["RestartSec"]) > longest
    assert seconds(service["TimeoutStopSec"]) > longest
    starts = parsed["Unit"]
    burst, interval = int(starts["StartLimitBurst"]), starts["StartLimitIntervalSec"]
    # Otherwise a program that always fails would be started for ever.
    assert burst * seconds(service["RestartSec"]) < seconds(interval)


@pytest.mark.parametrize("name", VIRTUAL_MACHINES)
def test_the_unit_keeps_the_directory_mounted(name: str) -> None:
    parsed = unit(text(name, "train.service"))
    mount = parsed["Unit"]["RequiresMountsFor"]
    assert directory(name).startswith(f"{mount}/")
    preparing = "startup.sh" if name == "gce" else "cloud-init.yaml"
    assert f"mount {mount}" in text(name, preparing)
    program, script = parsed["Service"]["ExecStart"].split()
    assert script == "/opt/train/train.py"
    assert script in text(name, preparing)
    assert f"{Path(program).parent}/pip install" in text(name, preparing)
    assert parsed["Install"]["WantedBy"] == "multi-user.target"
    assert "systemctl enable --now --no-block train.service" in text(name, preparing)


def test_the_page_has_the_numbers_of_the_unit() -> None:
    service = unit(text("gce", "train.service"))["Service"]
    for key in ("RestartForceExitStatus", "Restart", "RestartSec", "TimeoutStopSec"):
        assert f"`{key}={service[key]}`" in page("gce")
    for name in VIRTUAL_MACHINES:
        assert "unit" in page(name)
    for name in ("aws", "gce"):
        assert f"{service['RestartSec']} s before it restarts the program" in page(name)


@pytest.mark.parametrize("name", ["aws", "azure"])
def test_user_data_has_the_files_as_they_are(name: str) -> None:
    done = subprocess.run(
        [RECIPES / name / "user-data.sh", SHARE, WHEEL],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith("#cloud-config\n")
    assert re.findall(r"@[A-Z_]+@", done.stdout) == []
    # EC2 takes no more; base64 does not count.
    assert len(done.stdout) < 16 * 1024
    data = yaml.safe_load(done.stdout)
    assert set(data) == {
        "package_update", "packages", "mounts", "write_files", "runcmd"
    }  # fmt: skip
    written = {
        each["path"]: base64.b64decode(each["content"], validate=True).decode()
        for each in data["write_files"]
    }
    assert written == {
        "/opt/train/train.py": text(name, "train.py"),
        "/etc/systemd/system/train.service": text(name, "train.service"),
    }
    assert {each["encoding"] for each in data["write_files"]} == {"b64"}
    ((share, point, *rest),) = data["mounts"]
    assert (share, point) == (SHARE, "/srv/ckpt")
    assert all(isinstance(word, str) for word in rest)
    # Azure mounts its temporary disk on /mnt, and hides files there.
    assert not point.startswith("/mnt")
    for line in data["runcmd"]:
        subprocess.run(["bash", "-n", "-c", line], check=True)
    (installed,) = (line for line in data["runcmd"] if "pip install" in line)
    assert shlex.split(installed)[-1] == f"tfpreempt @ {WHEEL}"


@pytest.mark.parametrize("name", ["aws", "azure"])
def test_user_data_needs_a_share(name: str) -> None:
    done = subprocess.run([RECIPES / name / "user-data.sh"], capture_output=True)
    assert done.returncode != 0


NO_WHEELS = [
    "",
    WHEEL.partition("#")[0],
    WHEEL[:-1],
    WHEEL.replace("https", "http"),
    WHEEL.replace("host", "user:password@host"),
    WHEEL.replace("/a/", "/$(id)/"),
    WHEEL.replace("/a/", "/a b/"),
    "/srv/ckpt/wheels/tfpreempt-1.0-py3-none-any.whl",
]


@pytest.mark.parametrize("wheel", NO_WHEELS)
@pytest.mark.parametrize(
    "script", ["aws/user-data.sh", "azure/user-data.sh", "gce/create.sh", "tpu/keep.sh"]
)
def test_a_package_without_its_sum_is_refused(
    script: str, wheel: str, tmp_path: Path
) -> None:
    (tmp_path / "gcloud").write_text("#!/bin/bash\necho called\n")
    (tmp_path / "gcloud").chmod(0o755)
    done = subprocess.run(
        [RECIPES / script, SHARE, wheel],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr


@pytest.mark.parametrize("name", [*VIRTUAL_MACHINES, "tpu"])
def test_nothing_on_the_share_is_run_and_nothing_runs_as_root(name: str) -> None:
    parsed = unit(text(name, "train.service"))
    service, share = parsed["Service"], parsed["Unit"]["RequiresMountsFor"]
    assert service["User"] == "train"
    assert service["NoNewPrivileges"] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["ReadWritePaths"] == share
    preparing = text(
        name, "startup.sh" if name in ("gce", "tpu") else "cloud-init.yaml"
    )
    assert f"{share}/" not in preparing
    assert "nosuid,nodev,noexec" in preparing
    ((user, home),) = re.findall(
        r"useradd --uid (\d+) --home-dir (\S+) .* train$", preparing, re.MULTILINE
    )
    assert home == f"/var/lib/{service['StateDirectory']}"
    assert f"-o {user} -g {user} {Path(directory('gce')).name}`" in page(name)
    (installed,) = re.findall(r"pip install ((?:.*\\\n)*.*)", preparing)
    assert installed.startswith("--only-binary :all: ")


def complaints_of_amazon(service: str, shape: str, given: Any) -> str:
    from botocore.loaders import Loader  # heavy, and for this alone
    from botocore.model import ServiceModel
    from botocore.validate import ParamValidator

    model = ServiceModel(Loader().load_service_model(service, "service-2"))
    return str(
        ParamValidator().validate(given, model.shape_for(shape)).generate_report()
    )


def test_amazon_knows_the_launch_template() -> None:
    given = json.loads(text("aws", "launch-template.json"))
    assert complaints_of_amazon("ec2", "RequestLaunchTemplateData", given) == ""
    assert given["UserData"] == "@USER_DATA@"
    assert given["MetadataOptions"]["HttpEndpoint"] == "enabled"
    # With the group's own distribution it must not ask for Spot itself.
    assert "InstanceMarketOptions" not in given
    spoilt = {**given, "MetadataOption": {}}
    assert complaints_of_amazon("ec2", "RequestLaunchTemplateData", spoilt) != ""


def test_amazon_knows_the_group() -> None:
    given = json.loads(text("aws", "group.json"))
    shape = "CreateAutoScalingGroupType"
    assert complaints_of_amazon("autoscaling", shape, given) == ""
    policy = given["MixedInstancesPolicy"]
    specification = policy["LaunchTemplate"]["LaunchTemplateSpecification"]
    template, group = command("aws", "aws")
    assert (
        flags(template)["launch-template-name"] == (specification["LaunchTemplateName"])
    )
    spot = policy["InstancesDistribution"]
    assert spot["OnDemandBaseCapacity"] == 0
    assert spot["OnDemandPercentageAboveBaseCapacity"] == 0
    # Never two instances in one directory.
    assert (given["MaxSize"], given["CapacityRebalance"]) == (1, False)
    (hook,) = given["LifecycleHookSpecificationList"]
    assert hook["LifecycleTransition"] == "autoscaling:EC2_INSTANCE_TERMINATING"
    assert f"the shutdown for up to {hook['HeartbeatTimeout']} s" in page("aws")
    assert flags(group)["cli-input-json"] == "file://group.json"
    assert {*flags(template), *flags(group)} <= AWS


def test_google_makes_one_spot_machine_of_these_files() -> None:
    template, group = command("gce", "gcloud")
    given = flags(template)
    assert {*given, *flags(group)} <= GCLOUD
    assert template[1:4] == ["compute", "instance-templates", "create"]
    assert group[1:5] == ["compute", "instance-groups", "managed", "create"]
    assert given["provisioning-model"] == "SPOT"
    assert flags(group)["template"] == template[4]
    assert flags(group)["size"] == "1"
    files = dict(
        pair.split("=") for pair in str(given["metadata-from-file"]).split(",")
    )
    for file in files.values():
        assert (RECIPES / "gce" / file).is_file()
    asked = set(re.findall(r"attribute ([a-z-]+)", text("gce", "startup.sh")))
    told = {*files, *(each.partition("=")[0] for each in given["metadata"].split(","))}
    # The one that Google's agent runs itself.
    assert told - {"startup-script"} == asked
    assert files["startup-script"] == "startup.sh"


def test_microsoft_makes_one_spot_machine() -> None:
    ((*words,),) = command("azure", "az")
    given = flags(words)
    assert set(given) <= AZ
    assert words[1:3] == ["vmss", "create"]
    assert given["priority"] == "Spot"
    assert given["eviction-policy"] in ("Delete", "Deallocate")
    assert given["instance-count"] == "1"
    assert "disable-overprovision" in given
    assert f"`--spot-restore-timeout {given['spot-restore-timeout']}`" in page("azure")
