// SPDX-License-Identifier: Apache-2.0
// The two functions of shim.h that need C++: torch reports errors by C++ exceptions, and it
// allocates the memory of optional arguments with operator new.
#include <new>
#include <stdexcept>

extern "C" {
[[noreturn]] void torch_throw(const char *text);
void torch_cell_delete(void *cell);
}

void torch_throw(const char *text)
{
    throw std::runtime_error(text);
}

void torch_cell_delete(void *cell)
{
    ::operator delete(cell);
}
