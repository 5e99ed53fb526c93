# find_package(unflip) gives the target unflip::unflip.
include("${CMAKE_CURRENT_LIST_DIR}/unflipTargets.cmake")
