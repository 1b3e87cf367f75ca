"""One file, the environment, flags: the later wins, and who is wrong is told by name."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvlease.errors import BadInput, ConfigError
from kvlease.services.serving.config import (
    ENGINE_KEYS,
    SETTINGS,
    ServeConfig,
    TenantSection,
    default_of,
    read_config,
)
from kvlease.services.serving.plan import make_plan
from tests.tidy.rules import ROOT

SECRET = "a secret of more than sixteen bytes"


def read(
    text: str | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, str | list[str]] | None = None,
    folder: Path | None = None,
) -> ServeConfig:
    path = None
    if text is not None:
        assert folder is not None
        (folder / "serve.toml").write_text(text)
        path = str(folder / "serve.toml")
    return read_config(path, environment or {}, flags or {})


def test_the_later_wins(tmp_path: Path) -> None:
    text = "[limits]\nmax_streams = 1\nmax_connections = 1\nidle_timeout_s = 1\n"
    environment = {"KVLEASE_MAX_CONNECTIONS": "2", "KVLEASE_IDLE_TIMEOUT": "2.5"}
    config = read(text, environment, {"limits.idle_timeout_s": "3"}, tmp_path)
    limits = config.limits
    assert (limits.max_streams, limits.max_connections, limits.idle_timeout_s) == (1, 2, 3.0)
    assert str(limits.max_prompt_tokens) == default_of("limits.max_prompt_tokens")


def test_everything_can_be_said_in_the_file(tmp_path: Path) -> None:
    text = """
listen = ["unix:///run/k.sock", "tcp://127.0.0.1:1"]
log_level = "normal"
[engine]
device_pages = 7
dtype = "bfloat16"
exact = false
[[tenants]]
name = "blue"
secret_file = "blue"
device_pages = 3
"""
    config = read(text, folder=tmp_path)
    assert config.listen == ("unix:///run/k.sock", "tcp://127.0.0.1:1")
    assert (config.engine.device_pages, config.engine.exact) == (7, False)
    assert config.engine.cache_events > 0
    assert config.tenants[0].device_pages == 3


def test_the_environment_names_the_file_and_lists_addresses(tmp_path: Path) -> None:
    (tmp_path / "k.toml").write_text("[limits]\nmax_streams = 5\n")
    environment = {
        "KVLEASE_CONFIG": str(tmp_path / "k.toml"),
        "KVLEASE_LISTEN": "unix:///a,tcp://127.0.0.1:0",
        "KVLEASE_EXACT": "false",
        "HOME": "elsewhere",
    }
    config = read(environment=environment)
    assert config.limits.max_streams == 5
    assert config.listen == ("unix:///a", "tcp://127.0.0.1:0")
    assert config.engine.exact is False


def test_a_cuda_device_has_defaults_of_its_own() -> None:
    """The device tier takes what is free there, and exact mode is off."""
    engine = read(flags={"engine.device": "cuda"}).engine
    assert (engine.device_pages, engine.exact) == (0, False)
    said = {"engine.device": "cuda", "engine.device_pages": "9", "engine.exact": "true"}
    engine = read(flags=said).engine
    assert (engine.device_pages, engine.exact) == (9, True)
    assert (read().engine.device_pages, read().engine.exact) == (512, True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("foo = 1", r"serve\.toml: foo: there is no such key"),
        ("[limits]\nmax_stream = 1", r"serve\.toml: limits\.max_stream: there is no such key"),
        ("[limits]\nmax_streams = 'x'", r"limits\.max_streams: Expected `int`"),
        ("[engine]\ndecode_ahead = 'x'", r"engine\.decode_ahead: Expected `int`, got `str`"),
        ("[limits]\nmax_streams = 0", r"limits\.max_streams: max_streams is 0; give"),
        ("[engine]\ndevice_pags = 1", r"engine\.device_pags: .*known are .*device_pages"),
        ("[engine]\ntenant_salt = 'x'", r"engine\.tenant_salt: there is no such key"),
        ("[engine]\ndevice_pages = 0", r"engine\.device_pages: device_pages is 0"),
        ("[engine]\ndtype = 'int8'", r"engine\.dtype: Invalid enum value 'int8'"),
        ("engine = 3", r"serve\.toml: engine: Expected"),
        ("[[tenants]]\nname = 'a'", r"tenants\[0\]: .*secret_file"),
        ("x = = 1", r"serve\.toml is no TOML"),
        ("[limits]\nframe_timeout_s = nan", r"limits\.frame_timeout_s: .* is nan; give seconds"),
        ("[limits]\nwrite_timeout_s = inf", r"limits\.write_timeout_s: .* is inf; give seconds"),
        ("[limits]\nwrite_timeout_s = 1e8", r"limits\.write_timeout_s: .*, up to 2000000"),
        ('secret_file = "a\\u0000"', r"secret_file: Expected `str` matching"),
        ('listen = ["unix:///a\\u0000b"]', r"listen\[0\]: Expected `str` matching"),
        ('[[tenants]]\nname = "a"\nsecret_file = "a\\u0000"', r"tenants\[0\]\.secret_file: Exp"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(text, folder=tmp_path)


ODD = (
    "true", "-1", "0", "1.5", "nan", "-inf", "1e300", "9223372036854775808", "''", "'x'", "[]",
    "['x']", "[1]", "{}", "{a=1}", "1979-05-27", '"\\u0000"', '"a\\n\\u001b[31m"', f"'{'y' * 300}'",
    f"'{'y' * 5000}'", "[{}]", "99999999999999999999999",
)  # fmt: skip
KEYS = {
    "": ("listen", "http", "secret_file", "tls_cert", "tls_key", "model", "log", "log_level",
         "tenants", "engine", "limits"),
    "[engine]": ENGINE_KEYS,
    "[limits]": ServeConfig().limits.__struct_fields__,
    "[[tenants]]": TenantSection.__struct_fields__,
}  # fmt: skip


@pytest.mark.parametrize("section", KEYS)
def test_no_value_of_any_key_is_more_than_one_sentence(section: str, tmp_path: Path) -> None:
    """It is taken, or refused in one short line that names the key."""
    (tmp_path / "secret").write_text(SECRET)
    refused = 0
    for key in KEYS[section]:
        for value in ODD:
            fields = {key: value}
            if section == "[[tenants]]":
                fields = {"name": "'a'", "secret_file": f"'{tmp_path / 'secret'}'", key: value}
            lines = [section, *(f"{name} = {text}" for name, text in fields.items())]
            try:
                make_plan(read("\n".join(lines), folder=tmp_path))
            except BadInput as error:
                sentence = str(error)
                assert key in sentence
                assert sentence.isprintable()
                assert len(sentence) < 600
                refused += 1
    assert refused > 10 * len(KEYS[section]) // 2


def test_a_mistake_elsewhere_is_named_with_who_made_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"KVLEASE_MAX_STREAMS: limits\.max_streams: Expected"):
        read(environment={"KVLEASE_MAX_STREAMS": "many"})
    with pytest.raises(ConfigError, match=r"--max-streams: limits\.max_streams: Expected"):
        read(flags={"limits.max_streams": "many"})
    with pytest.raises(ConfigError, match="KVLEASE_MAX_STREMS"):
        read(environment={"KVLEASE_MAX_STREMS": "1"})
    with pytest.raises(ConfigError, match="cannot read"):
        read_config(str(tmp_path / "none.toml"), {}, {})


def test_every_setting_is_a_key_with_a_flag_of_its_own() -> None:
    """Names are a contract: each can be set in all three places, and is in docs/serve.md."""
    document = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    for setting in SETTINGS:
        default_of(setting.key)
        assert f"`{setting.key}`" in document, setting.key
        assert f"`{setting.flag}`" in document, setting.flag
    assert len({setting.flag for setting in SETTINGS}) == len(SETTINGS)
    limits = set(ServeConfig().limits.__struct_fields__)
    assert {s.key.removeprefix("limits.") for s in SETTINGS if "limits" in s.key} == limits


def test_a_plan_reads_secrets_and_keeps_strangers_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET + "\n")
    open_to_all = ServeConfig(listen=("tcp://0.0.0.0:1",))
    with pytest.raises(ConfigError, match="other machines"):
        make_plan(open_to_all)
    closed = ServeConfig(listen=("tcp://0.0.0.0:1",), secret_file=str(tmp_path / "secret"))
    plan = make_plan(closed)
    assert plan.tenants.by_name[""].secret == SECRET.encode()
    assert plan.tenants.by_name[""].is_admin


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (ServeConfig(model="/nowhere/at/all"), "is no folder"),
        (ServeConfig(secret_file="/nowhere/at/all"), "cannot read the secret"),
        (ServeConfig(tls_cert="a"), "go together"),
        (ServeConfig(tls_cert="/nowhere/c", tls_key="/nowhere/k"), "cannot load tls_cert"),
        (ServeConfig(listen=()), "listen is empty"),
        (ServeConfig(listen=("udp://x:1",)), "write tcp://HOST:PORT"),
        (ServeConfig(listen=("tcp://x",)), "write tcp://HOST:PORT"),
        (ServeConfig(listen=("unix://",)), "has no path"),
        (ServeConfig(log_level="audit"), "say which with log"),
        (ServeConfig(log="/nowhere/at/all/log"), "does not exist"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(config: ServeConfig, says: str) -> None:
    with pytest.raises(ConfigError if "exist" not in says else Exception, match=says):
        make_plan(config)


def test_a_secret_that_is_none_is_refused(tmp_path: Path) -> None:
    for text, says in (("", "is empty"), ("short", "16 or more")):
        (tmp_path / "secret").write_text(text)
        with pytest.raises(ConfigError, match=says):
            make_plan(ServeConfig(secret_file=str(tmp_path / "secret")))
