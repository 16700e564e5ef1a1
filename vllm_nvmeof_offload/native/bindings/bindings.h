// SPDX-License-Identifier: Apache-2.0
// The functions that bind the parts of the module `_tiers`.
#pragma once

#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_foreign(nb::module_& m);
void bind_machine(nb::module_& m);
void bind_look_ups(nb::module_& m);  // call this after binding `Tiers`
