#include "sanitized.h"

#ifdef TOPREDUCE_SANITIZED
const bool topreduce::kSanitized = true;
#else
const bool topreduce::kSanitized = false;
#endif

#ifdef __SANITIZE_THREAD__
const bool topreduce::kThreadsSanitized = true;
#else
const bool topreduce::kThreadsSanitized = false;
#endif
