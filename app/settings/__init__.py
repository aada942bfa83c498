"""Every option of the server, in one typed model.

Each field is an option of `tinsmith serve`, an environment variable `TINSMITH_<NAME>` and a key of one TOML file, in
this precedence: command line, environment, file, default. Unknown keys are refused in all three. The fields are in one
file for each theme (`network.py`, `storage.py`, ...), `model.py` puts them together, `loading.py` reads the layers. Not
responsible for parsing the command line (`app/cli.py`) or for the documentation table (`app/settings_docs.py`); both
are made from this model. Imports nothing heavy: `tinsmith serve --help` goes through here.
"""

from app.settings.base_models import DEFAULT_BASE_MODEL, BaseModelSource
from app.settings.loading import OTHER_ENV, SettingsError, check_folders, load_settings, missing_folder
from app.settings.model import ENV_PREFIX, THEMES, Settings

__all__ = [
    "DEFAULT_BASE_MODEL",
    "ENV_PREFIX",
    "OTHER_ENV",
    "THEMES",
    "BaseModelSource",
    "Settings",
    "SettingsError",
    "check_folders",
    "load_settings",
    "missing_folder",
]
