"""An import-linter contract: a module imports a limited number of the package's modules."""

from typing import Any

from importlinter import Contract, ContractCheck, fields, output


class FanOutContract(Contract):
    """Allows at most `limit` imports of the package's modules, except in the modules `exempt`."""

    limit = fields.IntegerField()
    exempt = fields.SetField(subfield=fields.StringField(), required=False, default=set())

    def check(self, graph: Any, verbose: bool) -> ContractCheck:
        package = self.session_options["root_packages"][0]
        found = {}
        for module in graph.modules - set(self.exempt):
            own = {
                m for m in graph.find_modules_directly_imported_by(module) if m.startswith(package)
            }
            if len(own) > self.limit:
                found[module] = len(own)
        return ContractCheck(kept=not found, metadata={"found": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for module, count in sorted(check.metadata["found"].items()):
            output.print_error(f"{module} imports {count} of the package's modules", bold=False)
