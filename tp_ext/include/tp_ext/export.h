// Marks what libtp_ext.so shows to programs and to the Python module; everything else is hidden.

#pragma once

#define TP_EXT_API __attribute__((visibility("default")))
