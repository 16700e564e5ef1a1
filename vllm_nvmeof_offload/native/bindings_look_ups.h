// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace nb = nanobind;

// After `Tiers`.
void bind_look_ups(nb::module_& m);
