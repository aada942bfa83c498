"""Settings: layers, refusals, and the documentation that is made from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from app import settings_docs
from app.settings import DEFAULT_BASE_MODEL, Settings, SettingsError, check_folders, load_settings

ROOT = Path(__file__).parents[2]


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "tinsmith.toml"
    file.write_text(text)
    return file


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    config = write(tmp_path, "port = 1\nmax_rank = 1\nmax_adapters = 1\n")
    environ = {"TINSMITH_PORT": "2", "TINSMITH_MAX_RANK": "2"}
    settings = load_settings({"port": "3", "host": None}, config=config, environ=environ)
    assert (settings.port, settings.max_rank, settings.max_adapters, settings.host) == (3, 2, 1, "127.0.0.1")


def test_the_environment_names_the_file(tmp_path: Path) -> None:
    config = write(tmp_path, "port = 17\n")
    assert load_settings(environ={"TINSMITH_CONFIG": str(config)}).port == 17


def test_samplers_in_every_form(tmp_path: Path) -> None:
    config = write(tmp_path, 'ray = "local"\nsamplers = 3\n')
    assert load_settings(config=config, environ={}).sampler_counts == (3, 3)
    assert load_settings({"samplers": "1:4"}, config=config, environ={}).sampler_counts == (1, 4)
    assert load_settings(environ={}).sampler_counts == (0, 0)


def test_base_models_in_every_form(tmp_path: Path) -> None:
    config = write(
        tmp_path, 'base_model = ["org/a", "b=/models/b", {name = "c", path = "hub/c", tokenizer_id = "t"}]\n'
    )
    settings = load_settings(config=config, environ={})
    assert settings.base_models == {"org/a": "org/a", "b": "/models/b", "c": "hub/c"}
    assert settings.tokenizers == {"c": "t"}
    assert load_settings(environ={"TINSMITH_BASE_MODEL": "x=/1, y"}).base_models == {"x": "/1", "y": "y"}
    assert load_settings({"base_model": ["m=~/folder"]}, environ={}).base_models["m"] == str(Path.home() / "folder")
    assert load_settings(environ={}).base_models == {DEFAULT_BASE_MODEL: None}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TINSMITH_PROT": "1"}, ["TINSMITH_PROT", "did you mean TINSMITH_PORT"]),
        ({"TINSMITH_PORT": "many"}, ["port", "'many'", "environment", "integer"]),
        ({"TINSMITH_PORT": "70000"}, ["port", "65535"]),
        ({"TINSMITH_SESSION_TIMEOUT": "179"}, ["session_timeout", "180"]),
        ({"TINSMITH_POLL_HOLD": "41"}, ["poll_hold", "40"]),
        ({"TINSMITH_SEQ_GAP_TIMEOUT": "nan"}, ["seq_gap_timeout", "finite"]),
        ({"TINSMITH_BASE_MODEL": "../x"}, ["base_model", "'../x'", "NAME=PATH"]),
        ({"TINSMITH_BASE_MODEL": "a,a"}, ["base_model", "'a'", "twice"]),
        ({"TINSMITH_BASE_MODEL": "a="}, ["base_model", "nothing after"]),
        ({"TINSMITH_SAMPLERS": "2"}, ["samplers", "'2'", "give the setting ray"]),
        ({"TINSMITH_RAY": "local", "TINSMITH_SAMPLERS": "4:2"}, ["samplers", "'4:2'", "2:4"]),
        ({"TINSMITH_RAY": "local", "TINSMITH_SAMPLERS": "0"}, ["samplers", "'0'"]),
        ({"TINSMITH_DTYPE": "float16"}, ["dtype", "'float16'", "'bfloat16'"]),
        ({"TINSMITH_ENGINE": "tensor"}, ["engine", "'tensor'", "torch, fsdp"]),
        ({"TINSMITH_RANKS": "2"}, ["ranks", "'2'", "environment", "engine 'torch'", "one process"]),
        ({"TINSMITH_CONFIG": "/does/not/exist.toml"}, ["/does/not/exist.toml", "No such file"]),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_source(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(environ=environ)
    for word in words:
        assert word in str(refused.value)


def test_unknown_and_broken_file_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"max_ranks.*file.*did you mean max_rank"):
        load_settings(config=write(tmp_path, "max_ranks = 4\n"), environ={})
    with pytest.raises(SettingsError, match="not valid TOML"):
        load_settings(config=write(tmp_path, "max_rank = = 4\n"), environ={})
    with pytest.raises(SettingsError, match=r"base_model\.0\.paths"):
        load_settings(config=write(tmp_path, 'base_model = [{name = "a", paths = "b"}]\n'), environ={})


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load_settings(environ={"TINSMITH_THREADS": "", "TINSMITH_PORT": ""}).port == 8410


def test_the_process_environment_does_not_reach_settings_built_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_PORT", "1")
    assert Settings().port == 8410
    assert load_settings().port == 1


def test_the_documentation_is_up_to_date() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == settings_docs.page(), "run `make docs`"


def test_every_setting_is_described() -> None:
    for name, info in Settings.model_fields.items():
        assert info.description, name
        assert info.description.endswith((".", "!")), name


def test_a_folder_that_is_not_there_is_named_at_once(tmp_path: Path) -> None:
    settings = load_settings({"base_model": [f"acme/x={tmp_path / 'absent'}", f"acme/y={tmp_path}"]}, environ={})
    with pytest.raises(SettingsError, match=r"acme/x: there is no folder .*absent"):
        check_folders(settings)


def test_a_folder_without_a_name_says_how_to_give_one() -> None:
    with pytest.raises(SettingsError) as error:
        load_settings({"base_model": ["/models/mine"]}, environ={})
    assert "org/model=/models/mine" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
