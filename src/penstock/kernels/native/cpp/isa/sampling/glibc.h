// The library must run with every glibc that PyTorch's wheels run with (2.28 and later). exp and log of glibc 2.29 differ
// from the older ones only in that they leave out the check for a user's error handler.
#pragma once

#include <features.h>

#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
#endif
