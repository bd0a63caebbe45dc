/* SPDX-License-Identifier: Apache-2.0 */
/* epic-info: prints what this build and machine can do, or what a running group is doing. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "info.h"

static const char help[] =
    "usage: epic-info                        what this build and this machine support\n"
    "       epic-info --sysfs FOLDER         the same, with GPUs and NICs from a copy of /sys\n"
    "       epic-info --group NAME [--json]  what the ranks of a running group are doing:\n"
    "                                        operations in flight, the last finished, and for\n"
    "                                        which ranks they waited\n"
    "       epic-info --group NAME --chrome  the last 256 operations of each rank, for "
    "Perfetto\n"
    "       epic-info --report [FILE]        write a file to send when something fails;\n"
    "                                        default: epic-report.txt; \"-\": standard output\n"
    "       epic-info --help\n"
    "\n"
    "NAME is epic_config.name, \"epic\" by default.  Ranks are found on this host, among the\n"
    "processes of this user.  Their memory is read, so stuck ranks are shown too.\n"
    "--report writes versions, topology, limits and EPIC's environment, without secrets.  If "
    "a\n"
    "launcher starts it with several ranks, rank 0 also writes a table of the bandwidth "
    "between\n"
    "them.  Start it like the program that failed.\n"
    "Exit status: 0; 1: no rank of the group was found, or no report was written; 2: usage.\n";

static int print_usage(const char *why, const char *what)
{
    fprintf(stderr, "epic-info: %s%s\n%s", why, what, help);
    return 2;
}

int main(int argc, char **argv)
{
    const char *group = NULL, *sysfs = NULL, *report = NULL;
    info_form form = INFO_TEXT;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--help")) {
            fputs(help, stdout);
            return 0;
        } else if (!strcmp(argv[i], "--json")) {
            form = INFO_JSON;
        } else if (!strcmp(argv[i], "--chrome")) {
            form = INFO_CHROME;
        } else if (!strcmp(argv[i], "--report")) {
            const bool has_path = i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0;
            report = has_path ? argv[++i] : "epic-report.txt";
        } else if (!strcmp(argv[i], "--group")) {
            if (++i == argc) return print_usage("--group needs the name of a group", "");
            group = argv[i];
        } else if (!strcmp(argv[i], "--sysfs")) {
            if (++i == argc) return print_usage("--sysfs needs a folder", "");
            sysfs = argv[i];
            struct stat about;
            if (stat(sysfs, &about) != 0 || !S_ISDIR(about.st_mode))
                return print_usage("--sysfs needs a folder; there is no folder ", sysfs);
        } else {
            return print_usage("unknown argument: ", argv[i]);
        }
    }
    if (group && sysfs) return print_usage("--sysfs: must be without --group", "");
    if (report && (group || sysfs || form != INFO_TEXT))
        return print_usage("--report: must be without other options", "");
    if (report) return info_report(report);
    if (group) return info_group(group, form);
    if (form != INFO_TEXT) return print_usage("--json and --chrome need --group", "");
    info_machine(stdout, sysfs ? sysfs : "/sys", true);
    return 0;
}
